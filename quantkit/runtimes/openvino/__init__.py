"""OpenVINO on Intel's CPUs, GPUs and NPUs: runs a bundle's `openvino/model.xml`. Needs openvino; no torch."""

from quantkit.runtimes.openvino.runtime import RUNTIME

__all__ = ["RUNTIME"]
