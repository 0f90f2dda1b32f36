"""GPTQ checkpoints unpacked word by word, after GPTQModel 7.7.0.

`nn_modules/qlinear/__init__.py`, `BaseQuantLinear.dequantize_weight`: with pack_factor = 32 // bits and
wf = [0, bits, 2 bits, ...], code i of a word is `(word >> wf[i]) & (2**bits - 1)`; 3 bits lie in three words for 32
codes: ten in the first with two bits of the eleventh, and so on. `weights = scales[g_idx] * (weight - zeros[g_idx])`,
[in, out]. `utils/model.py`, `convert_gptq_v1_to_v2_format_module`: a version 1 zero point is one less than meant.
"""

import numpy as np


def codes_down(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [W, N] -> [W * 32 / bits, N]."""
    words = words.astype(np.int64) & 0xFFFFFFFF
    found = []
    if bits == 3:
        for row in range(0, words.shape[0], 3):
            one, two, three = words[row], words[row + 1], words[row + 2]
            found += [(one >> 3 * i) & 7 for i in range(10)]
            found += [((one >> 30) & 3) | ((two & 1) << 2)]
            found += [(two >> 1 + 3 * i) & 7 for i in range(10)]
            found += [((two >> 31) & 1) | ((three & 3) << 1)]
            found += [(three >> 2 + 3 * i) & 7 for i in range(10)]
    else:
        for word in words:
            found += [(word >> bits * i) & (2**bits - 1) for i in range(32 // bits)]
    return np.stack(found)


def weight(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray, *, bits: int, version: int
) -> np.ndarray:
    """The weight as its readers have it, [in, out], in the dtype of the scales."""
    codes = codes_down(qweight, bits)
    zeros = codes_down(qzeros.T, bits).T + (1 if version == 1 else 0)
    rows = [(scales[g] * (codes[k] - zeros[g]).astype(scales.dtype)) for k, g in enumerate(g_idx)]
    return np.stack(rows)
