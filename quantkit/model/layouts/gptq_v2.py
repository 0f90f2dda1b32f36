"""Integers in the layout of GPTQModel, version 2, which stores zero points unchanged."""

from __future__ import annotations

from quantkit.model.layouts import Layout
from quantkit.model.layouts.gptq import GptqLayout

LAYOUT: Layout = GptqLayout("gptq_v2", less=0)
