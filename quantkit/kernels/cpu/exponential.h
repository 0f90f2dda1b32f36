#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

/* e^x with relative error 4e-6, in a form that compilers vectorise (Cephes, expf). NaN stays NaN. Below -87.7 the result
 * is 0, above 88.4 it is infinite, so x / (1 + e^-x) is 0 there. */
static inline float exponential(float x) {
    x = x < -88 ? -88 : x > 89 ? 89 : x;
    float whole = rintf(x * 1.44269504f), rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float found = 1.9875691500e-4f;
    found = found * rest + 1.3981999507e-3f;
    found = found * rest + 8.3334519073e-3f;
    found = found * rest + 4.1665795894e-2f;
    found = found * rest + 1.6666665459e-1f;
    found = found * rest + 5.0000001201e-1f;
    found = found * rest * rest + rest + 1;
    /* -127 to 128; NaN cannot be converted */
    int32_t bits = ((int32_t)(whole == whole ? whole : 0) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return found * power;
}
