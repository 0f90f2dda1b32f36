"""`quantkit batch`: compile many models by many recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import AllowCode, Json, OnCluster, TrustRemoteCode


def batch(
    config: Annotated[Path, typer.Argument(metavar="jobs.yaml", help="Models, recipes, settings, out folder.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list all jobs, run none.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    allow_code: AllowCode = False,
    on: OnCluster = None,
    as_json: Json = False,
) -> Answer:
    """Compile models by recipes, one table; called again, it goes on."""
    from quantkit.pipeline.many import executors
    from quantkit.pipeline.many.batch import BatchRun
    from quantkit.report import terminal

    run = BatchRun.load(config, trust_remote_code=trust_remote_code, allow_code=allow_code)
    if dry_run:
        listed = run.states()
        return Answer(listed, terminal.batch(listed))
    executor = executors.named(on or "local", where="--on", cpus=run.config.cpus)
    with showing() as progress:
        progress.begin(f"the jobs of {config}")
        run.run(executor, progress)
    done = run.as_dict()
    return Answer(done, terminal.batch(done), error=run.error())
