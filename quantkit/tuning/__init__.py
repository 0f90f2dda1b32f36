"""Mixed precision within a budget: measured harm per unit, an exact knapsack, a Pareto front, a recipe.

candidates.py   the weight schemes that a unit may have
harm.py         the KL that each scheme causes, measured unit by unit
front.py        budgets; the best scheme for every unit within a budget (scipy's HiGHS); the Pareto front
answer.py       the files of a search: recipe, front, harms, page
search.py       the whole search, from the model to the written recipe
placement.py    a search on the GPU for the inputs that a TensorRT network should quantize
"""
