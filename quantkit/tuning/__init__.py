"""Mixed precision within a budget: measured harm per unit, an exact knapsack, a Pareto front, a recipe.

candidates.py   which weight schemes a unit may have, and what each costs in bits and bytes
harm.py         what each does to the model's output, measured unit by unit
front.py        what the user allows; the best choice of one candidate a unit (scipy's HiGHS), for a sweep of
                budgets, and how well the sum of harms predicts the whole
answer.py       a choice as a recipe that people can read, and all that is left behind
search.py       the order of these things
placement.py    where a network for TensorRT quantizes inputs: a search on the GPU
"""
