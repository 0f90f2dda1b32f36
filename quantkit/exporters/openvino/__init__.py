"""OpenVINO's own form (`openvino/model.xml`): our codes as i4, u4 and u8 constants, the cache a state of the model."""

from quantkit.exporters.openvino.exporter import EXPORT

__all__ = ["EXPORT"]
