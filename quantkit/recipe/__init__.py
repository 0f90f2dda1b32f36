"""Recipes: `recipe.py` is the document, `changes.py` applies `--set` before it is validated."""

from quantkit.recipe.recipe import ADDED, CalibrationChoice, ExportStep, Gates, Override, PassStep, Recipe, assigners

__all__ = ["ADDED", "CalibrationChoice", "ExportStep", "Gates", "Override", "PassStep", "Recipe", "assigners"]
