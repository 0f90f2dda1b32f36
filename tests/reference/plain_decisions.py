"""What the decisions on a night rest on, slow and obviously right."""

from itertools import chain, combinations, pairwise
from statistics import median

import numpy as np
from scipy import optimize, stats


def holm(p):
    """By closed testing: a test stands if every set of tests that it belongs to stands by Bonferroni."""
    every = range(len(p))
    sets = list(chain.from_iterable(combinations(every, size) for size in range(1, len(p) + 1)))
    return [max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in every]


def tango_interval(lost, gained, n, level=0.95):
    """The outermost roots of a polynomial: Yang, Sun and Hardin, Statistics in Medicine 32 (2013)."""
    g = stats.norm.ppf(0.5 + level / 2) ** 2
    d, s = lost - gained, lost + gained
    roots = np.roots(
        [
            n**2 * (n / g + 1) ** 2,
            -n * d * (n / g + 1) * (4 * n / g + 1),
            2 * n * d**2 * (3 * n / g + 2) / g - n**2 * (s / g + 1),
            n * d * (2 * s / g + 1) - d**3 * (4 * n / g + 1) / g,
            d**2 * (d**2 / g - s) / g,
        ]
    )
    real = roots[abs(roots.imag) < 1e-9].real
    return real.min(), real.max()


def tango_score(lost, gained, n, loss):
    """The likeliest chances by search, not by formula."""

    def unlikely(q):
        chances = (q + loss, q, 1 - 2 * q - loss)
        return -sum(k * np.log(c) for k, c in zip((lost, gained, n - lost - gained), chances, strict=True) if k)

    low, high = max(0.0, -loss) + 1e-12, (1 - loss) / 2 - 1e-12
    q = optimize.minimize_scalar(unlikely, bounds=(low, high), method="bounded", options={"xatol": 1e-13}).x
    return (lost - gained - n * loss) / np.sqrt(n * (2 * q + loss - loss**2))


def slowdown(candidate, baseline, rounds, resamples, seed, *, stands=min):
    """(effect, draws): medians of the logarithms of the ratios of what stands for a block, whole rounds drawn again."""
    groups, start = [], 0
    for length in rounds:
        groups.append([])
        for block in range(start, start + length):
            above, below = (stands(times[block].ravel().tolist()) for times in (candidate, baseline))
            groups[-1].append(np.log(above) - np.log(below))
        start += length
    drawn = np.random.default_rng(seed).integers(0, len(groups), (resamples, len(groups)))
    draws = [median([ratio for group in chosen for ratio in groups[group]]) for chosen in drawn]
    return median([ratio for group in groups for ratio in group]), draws


def increase(before, after, clusters, resamples, seed):
    """(effect, draws): means of differences, whole clusters drawn again."""
    groups = [
        [a - b for b, a, c in zip(before, after, clusters, strict=True) if c == name] for name in sorted(set(clusters))
    ]
    generator, draws = np.random.default_rng(seed), []
    for chosen in generator.integers(0, len(groups), (resamples, len(groups))):
        values = [value for group in chosen for value in groups[group]]
        draws.append(sum(values) / len(values))
    every = [value for group in groups for value in group]
    return sum(every) / len(every), draws


def changes(values, window, p, least, *, retested=(-1, 0)):
    """[(index, p)]: energy distance over all pairs of pieces, t-tests by scipy, the weakest taken back.

    `retested`: which changes are tested again after one is taken out, counted from its place. apache-otava 0.8.0 tests
    (0, 1), and so leaves the one before it with the test of a stretch that is no more.
    """

    def test(left, right):
        if len(left) + len(right) <= 2:
            return 1.0
        parts = (np.mean(left), np.std(left), len(left), np.mean(right), np.std(right), len(right))
        return stats.ttest_ind_from_stats(*parts).pvalue

    def size(left, right):
        a, b = np.mean(left), np.mean(right)
        return max(abs(b / a - 1), abs(a / b - 1))

    def distance(x, y):
        n, m = len(x), len(y)
        total = sum(abs(a - b) for a in x for b in y)
        if n > 1:
            total -= m / (n - 1) * sum(abs(a - b) for a, b in combinations(x, 2))
        if m > 1:
            total -= n / (m - 1) * sum(abs(a - b) for a, b in combinations(y, 2))
        return 2 / (m + n) * total

    def divided(series):
        ends = [0, len(series)]
        while True:
            found = [
                (distance(series[a:t], series[t:k]), t, a, b)
                for a, b in pairwise(ends)
                for t in range(a + 1, b)
                for k in range(t + 1, b + 1)
            ]
            if not found:
                return ends[1:-1]
            _, t, a, b = max(found, key=lambda each: each[0])
            if not test(series[a:t], series[t:b]) <= 10 * p:
                return ends[1:-1]
            ends = sorted([*ends, t])

    points, start = set(), 0
    while start < len(values):
        inside = [start + at for at in divided(values[start : start + window])]
        points |= set(inside)
        start = max([*inside[-1:], start + window // 2])
    ends = [0, *sorted(points), len(values)]

    def tested(i):
        left, right = values[ends[i] : ends[i + 1]], values[ends[i + 1] : ends[i + 2]]
        return test(left, right), size(left, right)

    found = [tested(i) for i in range(len(ends) - 2)]
    while found:
        weakest = max(range(len(found)), key=lambda i: found[i][0])
        if found[weakest][0] < p:
            weakest = min(range(len(found)), key=lambda i: found[i][1])
            if found[weakest][1] > least:
                break
        del ends[weakest + 1], found[weakest]
        for step in retested:
            if 0 <= weakest + step < len(found):
                found[weakest + step] = tested(weakest + step)
    return [(index, result[0]) for index, result in zip(ends[1:-1], found, strict=True)]
