"""Choose the tokens that calibrate and the others that score; both begin as the model's prompts do."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import content
from quantkit.bundle import Decision
from quantkit.calibrate.tokens import pack
from quantkit.calibrate.tokens.heard import demand_recordings, load_heard
from quantkit.calibrate.tokens.pictured import demand_seeing, with_images
from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.model.structure.kinds import positions
from quantkit.passes import NOTE, decision
from quantkit.planning.support import with_remedy
from quantkit.recipe import CalibrationChoice, Recipe

if TYPE_CHECKING:
    from quantkit.bundle.manifest import CalibrationEntry
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.model.source.open import Source

# positions that accuracy is scored on, at least: by `quantkit measure`, and of a decoder by a compile
SCORED, LOOKED = 6000, 2000
# tokens of a text that gets one answer, a class
_TEXT = 64
# scored on where a calibration set has nothing left to score
_FALLBACK = "prose-en"
# text of the set is taken for what a model would write
INSTEAD = "set-instead"
# nothing to score a model of speech on
UNHEARD = "unscored-without-audio"
# records of a set are written in a form that the recipe does not name
FORM = "form-chosen"
_IDS = (".jsonl", ".json", ".parquet")


def public(reference: str) -> str:
    """Name a calibration set as a bundle may: by its name, or a file's name without its folder."""
    return f"path:{Path(reference).name}" if content.is_path(reference) else reference


def without_paths(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as a bundle may hold it: no path of this machine; files of passes lie beside it."""
    data = recipe.as_dict()
    files = {str(code.path): code.public for code in recipe.code}
    passes = [
        {
            files.get(name, name): settings
            | ({"imatrix": public(settings["imatrix"])} if settings.get("imatrix") else {})
            for name, settings in step.items()
        }
        for step in data["passes"]
    ]
    calibration = {**data["calibration"], "set": public(recipe.calibration.set)}
    if recipe.calibration.pictures is not None:
        calibration["images"] = public(recipe.calibration.pictures)
    return {**data, "calibration": calibration, "passes": passes}


def sequence_length(tokens: int, source: Source, decisions: list[Decision]) -> int:
    """Return the tokens of a sequence: those asked for, or as many as the model has positions."""
    most = positions(source.config)
    if most is not None and tokens > most:
        reason = f"the model has {most} positions"
        decisions.append(decision("calibrate", "sequences-shortened", "calibration.tokens", reason, tokens, most))
        return most
    return tokens


def demand_talking(choice: CalibrationChoice, kind: str) -> None:
    """Refuse a chat template, and text of its own, for what is no decoder.

    Raises InputError: `calibration-template`, `calibration-generated`.
    """
    mismatch = f"and the model's kind is {kind}"
    if choice.generated and kind != "decoder":
        where, value = "calibration.generated", f"{choice.generated:g}, {mismatch}"
        rule, remedy = "a decoder writes text", "--set calibration.generated=0"
        raise InputError("calibration-generated", where=where, value=value, rule=rule, remedy=remedy)
    if choice.template is not None and kind != "decoder":
        where, value = "calibration.template", f"{choice.template}, {mismatch}"
        rule = "only a decoder continues conversations"
        raise InputError(pack.CODE, where=where, value=value, rule=rule, remedy=pack.NONE)


def load(
    recipe: Recipe,
    source: Source,
    *,
    calibrate: bool,
    decisions: list[Decision],
    write: bool = True,
    whole: bool = True,
) -> tuple[TokenSet | None, TokenSet]:
    """Load the calibration set (None if no pass looks at data), and the scoring set.

    Args:
        decisions: list for deviations from the request.
        write: True to have the model write its share; else sequences of the set stand in, in number and length.
        whole: True to score on `SCORED` positions, or on the `LOOKED` of a shorter set; else a decoder on `LOOKED`.

    Raises InputError: of `load_tokens`; `nothing-to-score-on`; `calibration-template` and `-generated` for an encoder.
    """
    from quantkit.calibrate.tokens.ids import LONGEST, is_pairs, load_pair_tokens
    from quantkit.measurement.accuracy.purpose import purpose_of

    choice = recipe.calibration
    if choice.pictures is not None:
        demand_seeing(choice.pictures, source)
        if not calibrate:
            reason = "no image is looked at: nothing in the recipe needs calibration"
            decisions.append(decision("calibrate", NOTE, "calibration.images", reason))
    if source.hears and (recorded := _recorded(recipe, source, calibrate=calibrate)) is not None:
        return recorded
    demand_talking(choice, "decoder beside an encoder" if source.has_encoder else source.kind)
    tokens = sequence_length(choice.tokens, source, decisions)
    common = _common(recipe, source, tokens)
    if source.kind == "encoder" and is_pairs(choice.set):
        del common["special"], common["template"]
        seen = load_pair_tokens(choice.set, "calib", samples=choice.samples, **common) if calibrate else None
        # whole texts are scored, however short the sequences are that calibrate
        common["tokens"] = sequence_length(LONGEST, source, [])
        common["samples"] = -(-SCORED // common["tokens"])
        return seen, load_pair_tokens(choice.set, "eval", **common)
    calibration = _calibrating(recipe, source, common, decisions, write=write) if calibrate else None
    if calibration is not None and choice.pictures is not None:
        calibration = with_images(calibration, choice.pictures, source, recipe.seed)
    decisions += [] if calibration is None else _forms(calibration, "calibrate")
    if source.kind == "encoder" and purpose_of(source).gives == "text":
        common["tokens"] = min(tokens, _TEXT)  # one answer a text: more texts rather than longer ones
    positions = SCORED if whole or source.kind != "decoder" else _fewest()
    code, remedy = "scored-elsewhere", "give a longer --calibration"
    if common["tokenizer"] is None:
        remedy = f"add the tokenizer to the model's folder ({_FALLBACK} then scores), or give "
        remedy += _ids_wanted(choice, tokens)
    try:
        scoring = _scoring(choice.set, positions, common)
        if calibration is None:  # else it has the same to say
            decisions += [decision("score", NOTE, public(choice.set), note) for note in scoring.notes]
            decisions += _forms(scoring, "score")
        if calibration is None or not _overlap(calibration, scoring):
            return calibration, scoring
        problem = "it has nothing that calibration did not see"
        if common["tokenizer"] is None:
            # text would need one, so the ids behind those that calibrate score
            scoring = _scoring(choice.set, positions, common | {"skip": choice.samples})
            if not _overlap(calibration, scoring):
                reason = f"the first {choice.samples} sequences calibrate, the next {len(scoring.ids)} score"
                decisions.append(decision("score", NOTE, public(choice.set), reason))
                return calibration, scoring
    except InputError as error:
        if error.code == "calibration-random":
            problem, code = "its tokens are drawn at random", NOTE
            # as long as other recipes' sequences, so that their scores compare
            common["tokens"] = sequence_length(CalibrationChoice().tokens, source, [])
        elif error.code != "calibration-short":
            raise
        else:
            held = str(error.value).removesuffix(" in it")
            problem = (
                f"too short to score on: its part for scores holds {held}, and {_few(common['tokens'])} are needed; "
            )
            problem += "a longer file is scored itself"
            if held.endswith(" ids"):
                problem = f"too short to score on: a row has {held}, and a sequence {common['tokens']}"
                remedy = error.remedy
    if common["tokenizer"] is None or choice.set == _FALLBACK:
        raise _nothing(choice.set, problem, remedy)
    decisions.append(decision("score", code, public(choice.set), problem, public(choice.set), _FALLBACK))
    return calibration, _scoring(_FALLBACK, positions, common)


def training(recipe: Recipe, source: Source, name: str, settings: Any, scoring: TokenSet) -> TokenSet:
    """Load sequences of the recipe's set for a pass to train on, those that calibrate first, then those it holds out.

    Args:
        name: name of the pass.
        settings: its settings `sequences` and `held`.

    Raises InputError: as `load_tokens`; `recover-text`: too few, or some of them score.
    """
    from quantkit.calibrate.tokens.ids import load_tokens

    choice, where = recipe.calibration, public(recipe.calibration.set)
    common = _common(recipe, source, sequence_length(choice.tokens, source, []))
    rule = f"{name} trains on {settings.sequences} sequences and holds out {settings.held}"
    remedy = f"more text, or fewer sequences: --set {name}.sequences="
    if choice.samples > settings.sequences:
        value, instead = f"{choice.samples} sequences calibrate", f"--set {name}.sequences={choice.samples}"
        raise InputError("recover-text", where, value, f"{rule}, which must not calibrate", instead)
    try:
        loaded = load_tokens(choice.set, "calib", samples=settings.sequences + settings.held, **common)
    except InputError as error:
        if error.code != "calibration-short":
            raise
        there = re.match(r"(\d+) sequence", str(error.value))
        left = int(there[1]) - settings.held if there else 0
        remedy = f"{remedy}{left}" if left > 0 else "more text, or shorter sequences"
        raise InputError("recover-text", where, str(error.value), rule, remedy) from None
    if _overlap(loaded, scoring):
        remedy = f"{remedy}{max(1, settings.sequences // 2)}"
        raise InputError("recover-text", where, "some of them score", rule, remedy)
    return loaded


def _recorded(recipe: Recipe, source: Source, *, calibrate: bool) -> tuple[TokenSet | None, TokenSet] | None:
    """Load recordings for calibration and for scores; None where the recipe names none and needs none."""
    choice = recipe.calibration
    if not demand_recordings(choice.set, source, calibrate=calibrate):
        return None
    demand_talking(choice, "decoder beside an encoder")
    tokens = sequence_length(choice.tokens, source, [])
    seen = load_heard(choice.set, "calib", source, samples=choice.samples, tokens=tokens) if calibrate else None
    return seen, load_heard(choice.set, "eval" if calibrate else "all", source, samples=None, tokens=tokens)


def unheard(source: Source, scoring: TokenSet, decisions: list[Decision]) -> bool:
    """Tell whether a model of speech has no recordings to score on, and record it."""
    if not source.hears or scoring.lengths is not None:
        return False
    reason = "no recordings were given: quantkit measure BUNDLE --calibration FOLDER of WAV files scores it"
    if not any(step.code == UNHEARD for step in decisions):
        decisions.append(decision("score", UNHEARD, "score", reason))
    return True


def _forms(loaded: TokenSet, step: str) -> list[Decision]:
    """Return the decision on the form of a set's records, where one was taken."""
    if loaded.form is None:
        return []
    reason = f"{loaded.name} holds conversations, which the model's chat template writes"
    if loaded.form == "alpaca":
        reason = f"{loaded.name} holds Alpaca's records, and the tokenizer has no chat template: Alpaca's own prompts"
    return [decision(step, FORM, "calibration.template", reason, None, loaded.form)]


def _fewest() -> int:
    return min(LOOKED, SCORED)


def _few(tokens: int) -> int:
    """Count the fewest sequences for a score."""
    return -(-_fewest() // max(tokens - 1, 1))


def _ids_wanted(choice: CalibrationChoice, tokens: int) -> str:
    rows = choice.samples + _few(tokens)
    return f'a .jsonl of {rows} rows {{"input_ids": [...]}} of {tokens} ids or more: {choice.samples} rows calibrate'


def _scoring(reference: str, positions: int, common: dict[str, Any]) -> TokenSet:
    """Load so many positions, or the fewest that count where the set has no more."""
    from quantkit.calibrate.tokens.ids import load_tokens

    length = max(common["tokens"] - 1, 1)
    try:
        return load_tokens(reference, "eval", samples=-(-positions // length), **common)
    except InputError as error:
        if error.code != "calibration-short" or positions <= _fewest():
            raise
        return load_tokens(reference, "eval", samples=-(-_fewest() // length), **common)


def _nothing(where: str, value: str, remedy: str) -> InputError:
    rule = f"a score needs at least {_fewest()} tokens that did not calibrate"
    return InputError("nothing-to-score-on", where=where, value=value, rule=rule, remedy=remedy)


def _calibrating(
    recipe: Recipe, source: Source, common: dict[str, Any], decisions: list[Decision], *, write: bool
) -> TokenSet:
    """Load sequences of the recipe's set, and behind them those that the model writes."""
    from quantkit.calibrate.tokens.generated import fits, generated
    from quantkit.calibrate.tokens.ids import ids_sha256, load_tokens
    from quantkit.calibrate.tokens.pack import frame

    choice = recipe.calibration
    own = round(choice.generated * choice.samples)
    if not own:
        return load_tokens(choice.set, "calib", samples=choice.samples, **common)
    loaded = load_tokens(choice.set, "calib", samples=max(1, choice.samples - own), **common)
    written = None
    if write:
        before = frame(common["tokenizer"])[0]
        written = generated(source, samples=own, tokens=loaded.ids.shape[1], seed=recipe.seed, before=before)
    if written is None and (write or not fits(source)):
        reason = "the model does not fit in memory whole, so it writes nothing: all are of the set"
        decisions.append(decision("calibrate", INSTEAD, "calibration.generated", reason, choice.generated, 0))
        return load_tokens(choice.set, "calib", samples=choice.samples, **common)
    if written is None:
        written = loaded.ids.repeat(-(-own // len(loaded.ids)), 1)[:own]
    ids = torch.cat([loaded.ids[: choice.samples - own], written])
    return replace(loaded, ids=ids, sha256=ids_sha256(ids.numpy()), generated=own)


def again(
    recipe: Recipe, source: Source, asked: str | None, seen: CalibrationEntry | None, decisions: list[Decision]
) -> TokenSet:
    """Load the scoring set of a finished bundle: the one asked for, without fallback; else the recipe's.

    Args:
        asked: name or path of a set; None for the recipe's.
        seen: calibration set of the bundle, if there is one.
        decisions: list for deviations from the recipe.

    Raises InputError: `nothing-to-score-on`, if `asked` is too short, has no text, or calibrated the bundle; as
    `load_tokens`.
    """
    taken: list[Decision] = []
    if source.hears:
        return _heard_again(recipe, source, asked, seen)
    if asked is None:
        if recipe.calibration.set.startswith("path:"):
            own, reason = recipe.calibration.set, "a bundle does not hold the file that it was calibrated on"
            decisions.append(decision("score", "scored-elsewhere", own, reason, own, _FALLBACK))
            recipe = _on(recipe, _FALLBACK)
        scoring = load(recipe, source, calibrate=seen is not None, decisions=taken, write=False)[1]
        # how it was calibrated was decided when it was compiled
        decisions += [step for step in taken if step.code != INSTEAD]
        return scoring
    recipe = _on(recipe, asked)
    _, scoring = load(recipe, source, calibrate=False, decisions=taken)
    problem = next((step.reason for step in taken if step.to == _FALLBACK), "")
    if not problem and seen is not None and _calibrated(recipe, source, seen, scoring):
        problem = "the bundle was calibrated on it"
    if problem:
        raise _nothing(asked, problem, "give --calibration another set, or a longer one")
    decisions += taken
    return scoring


def _heard_again(recipe: Recipe, source: Source, asked: str | None, seen: CalibrationEntry | None) -> TokenSet:
    """Load recordings to score on: the half that did not calibrate, or all of another set; text if none are named."""
    if asked is None:
        return load(_on(recipe, CalibrationChoice().set), source, calibrate=False, decisions=[])[1]
    demand_recordings(asked, source, calibrate=True)
    how: dict[str, Any] = {"source": source, "tokens": sequence_length(recipe.calibration.tokens, source, [])}
    calibrated = seen is not None and load_heard(asked, "calib", samples=seen.samples, **how).sha256 == seen.ids_sha256
    return load_heard(asked, "eval" if calibrated else "all", samples=None, **how)


def _on(recipe: Recipe, chosen: str) -> Recipe:
    """Replace a recipe's calibration set."""
    return recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update={"set": chosen})})


def _calibrated(recipe: Recipe, source: Source, seen: CalibrationEntry, scoring: TokenSet) -> bool:
    """Tell whether a bundle was calibrated on sequences of its recipe's set that would score it."""
    from quantkit.calibrate.tokens.ids import load_tokens

    if scoring.pairs is not None:
        return False  # their splits are apart
    own = seen.generated or 0
    try:
        common = _common(recipe, source, seen.tokens)
        loaded = load_tokens(recipe.calibration.set, "calib", samples=max(1, seen.samples - own), **common)
    except InputError:
        return False  # there are no such sequences in it
    # what the model wrote, and images, are in the hash too, and nowhere else
    other = own > 0 or seen.images is not None
    return (other or loaded.sha256 == seen.ids_sha256) and _overlap(loaded, scoring)


def guiding(
    recipe: Recipe,
    source: Source,
    *,
    samples: int,
    tokens: int,
    calibration: TokenSet | None,
    decisions: list[Decision],
) -> TokenSet:
    """Load text for guiding a choice: the `tune` split of the recipe's set, free of calibration and scores.

    Args:
        decisions: list for deviations from the request.

    Raises InputError: of `load_tokens`.
    """
    from quantkit.calibrate.tokens.ids import load_tokens

    common = _common(recipe, source, tokens) | {"samples": samples}
    chosen, problem = recipe.calibration.set, "it has nothing that calibration did not see"
    try:
        loaded = load_tokens(chosen, "tune", **common)
        if calibration is None or not _overlap(calibration, loaded):
            return loaded
    except InputError as error:
        if error.code not in ("calibration-short", "calibration-split", "calibration-random") or chosen == _FALLBACK:
            raise
        problem = "it is too short, or has no tune split"
    decisions.append(decision("tune", "guided-elsewhere", public(chosen), problem, public(chosen), _FALLBACK))
    return load_tokens(_FALLBACK, "tune", **common)


def long(recipe: Recipe, source: Source, tokens: int, samples: int) -> TokenSet:
    """Load a few sequences of `tokens`, or of as many as the model has positions, to score on; of the recipe's set,
    where it is long enough. Raises InputError: of `load_tokens`."""
    from quantkit.calibrate.tokens.ids import load_tokens

    common = _common(recipe, source, sequence_length(tokens, source, [])) | {"samples": samples}
    try:
        return load_tokens(recipe.calibration.set, "eval", **common)
    except InputError as error:
        if error.code not in ("calibration-short", "calibration-ids", "calibration-split"):
            raise
        return load_tokens(_FALLBACK, "eval", **common)


def vocabulary(source: Source) -> int:
    """Return the upper bound of token ids. Raises InputError `vocabulary-unknown`."""
    size = source.config.get("vocab_size")
    if isinstance(size, int):
        return size
    table = None
    with suppress(NotImplementedError):
        table = getattr(source.skeleton().get_input_embeddings(), "weight", None)
    if table is None:
        value = f"{source.architecture} names no table of embeddings"
        rule, remedy = "token ids lie below the size of the vocabulary", 'set "vocab_size" in config.json'
        raise InputError("vocabulary-unknown", where=source.ref, value=value, rule=rule, remedy=remedy)
    return int(table.shape[0])


def _common(recipe: Recipe, source: Source, tokens: int) -> dict[str, Any]:
    """Return the options common to all sets.

    Sequences of a text begin and end as in use: outliers lie there, and a fixed scale needs them in its data.
    """
    tokenizer = None
    try:
        tokenizer = source.tokenizer()
    except InputError as error:
        if error.code != "tokenizer-missing" or not content.column_of(recipe.calibration.set)[0].endswith(_IDS):
            remedy = f"{error.remedy}, or --calibration FILE: {_ids_wanted(recipe.calibration, tokens)}"
            raise with_remedy(error, remedy) from None
    return {
        "tokenizer": tokenizer,
        "tokens": tokens,
        "seed": recipe.seed,
        "vocab_size": vocabulary(source),
        "special": "around" if source.kind == "encoder" else "before",
        "template": recipe.calibration.template,
    }


def _overlap(calibration: TokenSet, scoring: TokenSet) -> bool:
    length = min(calibration.ids.shape[1], scoring.ids.shape[1])
    seen = {tuple(row) for row in calibration.ids[:, :length].tolist()}
    return any(tuple(row) in seen for row in scoring.ids[:, :length].tolist())
