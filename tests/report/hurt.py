"""Harm with known figures, for the page."""

from quantkit.measurement.accuracy.harm import BlockHarm, Harm, InputHarm, LayerHarm, Position


def hurt(prefix: str = "model.layers") -> Harm:
    """Three blocks, the last the worst; down_proj the worst layer; two outlier channels that have gone."""
    return Harm(
        blocks=[BlockHarm(name=f"{prefix}.{i}", error=0.01 * (i + 1), own=0.01 * (1 + (i == 2))) for i in range(3)],
        layers=[
            LayerHarm(name=f"{prefix}.{i}.mlp.{kind}", error=error)
            for i in range(3)
            for kind, error in (("up_proj", 0.1), ("down_proj", 0.2))
        ],
        inputs=[
            InputHarm(name=f"{prefix}.{i}.mlp.down_proj", before=before, after=6.0)
            for i, before in enumerate((5.0, 30.0, 400.0))
        ],
        worst=[
            Position(
                sequence=0,
                position=4,
                kl=3.25,
                before=f"{prefix if '<' in prefix else 'the cat sat on the '}",
                follows=" mat",
                original=" mat",
                original_chance=0.75,
                candidate="\n",
                candidate_chance=0.5,
            )
        ],
        worst_share=0.24,
    )
