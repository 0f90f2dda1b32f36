"""A bundle with figures of this machine and of two devices: a slow one, and one that gains more than this one."""

from quantkit.bundle import Manifest, Verdict
from quantkit.measurement.rows import Device, Row
from quantkit.report.bundle.speed import DeviceRows
from report.timed import everything, exported_rows, judged, timed_rows

# seconds there for one here: of the original, and of the bundle
DEVICES = {
    "pi5": ("Cortex-A76", "aarch64", "neon_dotprod", 4.0, 4.8),
    "box": ("EPYC", "x86_64", "avx512_vnni", 0.5, 0.4),
}


def there(name: str) -> list[Row]:
    """What `measure --on` gives: the rows of this machine, times as many seconds."""
    processor, machine, isa, theirs, ours = DEVICES[name]
    device = Device(id=f"cpu-{name}", kind="cpu", name=processor, on=name, machine=machine, isa=isa)
    rows = [row for row in [*exported_rows(), *timed_rows()] if row.name != "size.bytes"]
    return [row.model_copy(update={"device": device, **_slower(row, theirs, ours)}) for row in rows]


def _slower(row: Row, theirs: float, ours: float) -> dict[str, object]:
    if row.unit != "s" or row.value is None:
        return {}
    changed: dict[str, object] = {"value": row.value * ours}
    if row.op is not None:
        times = {"hp_s": theirs, "bound_s": ours, "hp_bound_s": theirs}
        changed["op"] = row.op.model_copy(update={key: getattr(row.op, key) * by for key, by in times.items()})
    if row.quantiles is not None:
        changed["quantiles"] = {key: value * ours for key, value in row.quantiles.items()}
    if row.ci95 is not None:
        changed["ci95"] = tuple(each * ours for each in row.ci95)
    if row.baseline is not None and row.baseline.ratio is not None and row.baseline.ratio_ci95 is not None:
        by = theirs / ours
        ends = tuple(each * by for each in row.baseline.ratio_ci95)
        new = {"value": row.baseline.value * theirs, "ratio": row.baseline.ratio * by, "ratio_ci95": ends}
        changed["baseline"] = row.baseline.model_copy(update=new)
    return changed


def on_devices() -> tuple[Manifest, list[Row], list[DeviceRows]]:
    """The bundle, the rows of this machine, and what each device has."""
    verdicts = {
        "pi5": Verdict(answer="ship_up_to", batch=4, because=["2.00× the speed of float32 at batch 1 (1.94 to 2.06)"]),
        "box": Verdict(answer="ship_up_to", batch=16, because=["3.00× the speed of float32 at batch 1 (2.91 to 3.09)"]),
    }
    return judged(), everything(), [DeviceRows(name, there(name), verdicts[name]) for name in DEVICES]
