"""What to do to a model: `recipe.py` is the document, `changes.py` what `--set` changes before it is validated."""

from quantkit.recipe.recipe import ADDED, CalibrationChoice, ExportStep, Gates, Override, PassStep, Recipe, assigners

__all__ = ["ADDED", "CalibrationChoice", "ExportStep", "Gates", "Override", "PassStep", "Recipe", "assigners"]
