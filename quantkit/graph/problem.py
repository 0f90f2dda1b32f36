"""What ONNX Runtime says when it cannot load or run a graph, as one line: at which node, and why.

Its own words are a status, a place in its source, the call that stood there, and behind them the reason:

    [ONNXRuntimeError] : 1 : FAIL : Node (a/product) Op (MatMul) [ShapeInferenceError] Incompatible dimensions ...
    [ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running MatMul node. Name:'a/product' Status
        Message: matmul_helper.h:59 Compute MatMul dimension mismatch
    [ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Add(14) node with name 'a/sum'
    [ONNXRuntimeError] : 1 : FAIL : Type Error: ... of Optype (MatMul) bound to different types (... in node (a/b).
"""

from __future__ import annotations

import re

_LONGEST = 200
_STATUS = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_NODES = (
    re.compile(r"Node \((?P<name>[^)]*)\) Op \((?P<kind>[^)]*)\)\s*(?:\[\w+\])?\s*"),
    re.compile(r"Non-zero status code returned while running (?P<kind>\w+) node\. Name:'(?P<name>[^']*)'\s*"),
    re.compile(r"for (?P<kind>\w+)\(\d+\) node with name '(?P<name>[^']*)'"),
    re.compile(r"of Optype \((?P<kind>\w+)\)(?=.* in node \((?P<name>[^)]*)\))"),
    re.compile(r"(?P<kind>) of node \((?P<name>[^)]*)\)"),
)
# where in its source: all up to a condition that did not hold, or a file and a function
_PLACE = re.compile(r"^Status Message: (?:\S*onnxruntime_src/.* was false\. |\S+\.(?:h|cc|cpp):\d+ \w+ )?")


def told(problem: BaseException) -> tuple[str, str]:
    """(the node: `MatMul a/product`, empty where none is named; the reason).

    >>> told(ValueError("[ONNXRuntimeError] : 1 : FAIL : Node (a/b) Op (MatMul) [ShapeInferenceError] Wrong sizes"))
    ('MatMul a/b', 'Wrong sizes')
    """
    text = _STATUS.sub("", " ".join((str(problem) or type(problem).__name__).split()))
    for pattern in _NODES:
        if found := pattern.search(text):
            # what stands in the middle of a sentence stays there
            reason = text[found.end() :] if found.start() == 0 else text
            return f"{found['kind']} {found['name']}".strip(), _PLACE.sub("", reason)[:_LONGEST]
    return "", text[:_LONGEST]
