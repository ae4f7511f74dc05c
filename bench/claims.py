"""What the measurements must show, and whether they do."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def find(rows: list[Row], work: str, variant: str, **sizes: Any) -> Row | None:
    """The first row of that work and variant with those sizes, in float32 unless ``dtype`` says otherwise."""
    wanted = {"work": work, "variant": variant, "dtype": "float32", **sizes}
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def ratio(above: Row | None, below: Row | None, key: str = "ms") -> float | None:
    """How many times as much one row takes as another; None where one was not measured."""
    if above is None or below is None or not below.get(key):
        return None
    return float(above[key]) / float(below[key])


def claims(rows: list[Row]) -> list[dict[str, Any]]:
    """Each claim with its value, what is asked, and the verdict: ``met``, ``not met`` or ``not measured``."""
    found: list[dict[str, Any]] = []

    def claim(text: str, value: float | None, least: float | None = None, most: float | None = None) -> None:
        met = value is not None and (least is None or value >= least) and (most is None or value <= most)
        verdict = "not measured" if value is None else "met" if met else "not met"
        asked = f"≥ {least:g}" if least is not None else f"≤ {most:g}"
        shown = None if value is None else float(f"{value:.4g}")
        found.append({"claim": text, "value": shown, "asked": asked, "verdict": verdict})

    kernel = "kernel, W given"
    thirty = {"N": 1024, "T": 30}
    for dtype, how in (("float32", "captured"), ("bfloat16", "captured"), ("bfloat16", "captured, all halved")):
        sizes = {"B": 1, "dtype": dtype}
        name = f"paths, batch 1, {dtype}, {how}"
        whole, recent, alone, heads = (
            find(rows, "predict paths", f"{part}, {how}", **sizes)
            for part in ("cpl", "cpl (recent)", "encoder", "encoder and heads")
        )
        claim(f"{name}: whole prediction over encoder alone", ratio(whole, alone), most=1.15)
        claim(f"{name}: whole prediction over encoder and heads alone", ratio(whole, heads), most=1.15)
        claim(f"{name}: whole prediction with Recent over encoder alone", ratio(recent, alone), most=1.15)
        loop = find(rows, "predict paths", "per-row loop, eager", **sizes)
        claim(f"{name}: per-row loop with eager encoder over the prediction", ratio(loop, whole), least=12)
    for how in ("", ", captured"):
        large = find(rows, "greedy", kernel + how, B=1024, **thirty)
        claim(f"greedy, 30 of 1,024, batch 1,024, W given{how}: ms", None if large is None else large["ms"], most=0.2)
    loop = find(rows, "greedy", "per-row loop, W given", B=64, **thirty)
    for how in ("", ", captured"):
        fast = find(rows, "greedy", kernel + how, B=64, **thirty)
        claim(f"greedy, 30 of 1,024, batch 64{how}: per-row loop over the kernel", ratio(loop, fast), least=1000)
    for batch in (1, 64):
        for how in ("", ", captured"):
            pointer = find(rows, "greedy", f"pointer, cached{how}", B=batch, **thirty)
            fast = find(rows, "greedy", f"kernel, factors given{how}", B=batch, **thirty)
            name = f"greedy, 30 of 1,024, batch {batch}{how}: pointer with its cache over CPL"
            claim(name, ratio(pointer, fast), least=20)
    copy = find(rows, "copy", "torch")
    for batch, n, steps in ((8, 65_536, 64), (1, 10_000_000, 8)):
        for dtype in ("float32", "bfloat16"):
            many = find(rows, "greedy", "kernel, factors given, captured", B=batch, N=n, T=steps, dtype=dtype)
            passes = None if copy is None or many is None else many["ms"] / (many["mib"] * copy["ms"] / copy["mib"])
            name = f"greedy, {steps} of {n:,}, batch {batch}, factors given, {dtype}, captured"
            claim(f"{name}: over one pass over the keys a step", passes, most=1.4)
    parallel = find(rows, "predict subsets", "threshold, captured", B=1)
    for variant in ("cpl", "cpl (coverage)"):
        ours = find(rows, "predict subsets", f"{variant}, captured", B=1)
        claim(f"subsets, batch 1: {variant} over threshold, both captured", ratio(ours, parallel), most=1.1)
    for dtype in ("float32", "bfloat16"):
        sizes = {"B": 256, "N": 1024, "T": 32, "h": 128, "dtype": dtype}
        name = f"ordered_nll forward+backward, 32 of 1,024, batch 256, h = 128, {dtype}"
        for how in ("", ", captured"):
            fused, plain, compiled = (
                find(rows, "ordered_nll forward+backward", variant + how, **sizes)
                for variant in ("fused", "plain", "compiled")
            )
            claim(f"{name}{how}: plain over fused", ratio(plain, fused), least=3)
            claim(f"{name}{how}: compiled over fused", ratio(compiled, fused), least=1.3)
        fused, plain = (find(rows, "ordered_nll forward+backward", variant, **sizes) for variant in ("fused", "plain"))
        claim(
            f"{name}: peak memory, fused over plain, without the gradients", ratio(fused, plain, "work_mib"), most=0.25
        )
    large = find(rows, "ordered_nll forward+backward", "fused", B=8, N=65_536, T=64)
    claim(
        "ordered_nll forward+backward, 64 of 65,536, batch 8, trains: GiB at the peak, of the 139 there are",
        None if large is None else large["peak_mib"] / 1024,
        most=139,
    )
    return found
