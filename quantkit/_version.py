"""The version, which every floor may import; `quantkit` itself is above them all."""

__version__ = "0.1.0"
