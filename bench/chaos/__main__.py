"""`python -m bench.chaos`: runs rows of the fault matrix and prints figures as JSON lines."""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence

from bench.chaos.audit import leaks
from bench.chaos.fleet import Fleet, running
from bench.chaos.table import ROWS
from bench.chaos.traffic import Traffic
from bench.chaos.trial import Row, Trial
from bench.figure import line, show
from bench.serving import percentile

GAP_SECONDS = 5.0


async def run_trial(fleet: Fleet, traffic: Traffic, row: Row, number: int, seed: int) -> Trial:
    """One trial on a fleet that is whole, and what leaked from it."""
    trial = Trial(fleet, traffic, number, random.Random(f"{seed}/{row.name}/{number}"))
    try:
        await row.act(trial)
    except TimeoutError as error:
        trial.unproven.append(str(error))
    try:
        await fleet.whole()
        trial.leaked = await leaks(fleet)
    except TimeoutError as error:
        trial.broken.append(f"the mesh comes back by itself: {error}")
        await fleet.renew()
    return trial


async def run_row(fleet: Fleet, traffic: Traffic, row: Row, num_trials: int, seed: int) -> list[Trial]:
    """All trials of a row; what went wrong is said at once."""
    began, trials = time.monotonic(), []
    for number in range(num_trials):
        trial = await run_trial(fleet, traffic, row, number, seed)
        trials.append(trial)
        _tell(row, trial)
    print(f"{row.name} {row.what}: {num_trials} trials in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return trials


def _tell(row: Row, trial: Trial) -> None:
    def say(what: str) -> None:
        print(f"{row.name} trial {trial.number}: {what}", file=sys.stderr, flush=True)

    for what in trial.unproven:
        say(f"void: not so: {what}")
    for what in trial.broken:
        say(f"broken: not so: {what}")
    for stream in trial.lost[:5]:
        say(f"lost {stream.request_id}: {stream.error or 'no end'} {stream.reason} {stream.words} after {stream.num_received} tokens")
    for stream in trial.wrong[:5]:
        say(f"wrong {stream.request_id}: {stream.num_received} of {stream.num_tokens} tokens, seed {stream.seed}")
    if trial.leaked:
        say(f"leaked: {trial.leaked}")


def figures(row: Row, trials: Sequence[Trial]) -> list[dict[str, object]]:
    """Of the trials whose fault was felt."""
    felt = [trial for trial in trials if not trial.unproven]
    counts = {
        "lost": (sum(len(trial.lost) for trial in felt), "requests"),
        "doubled": (sum(trial.num_doubled for trial in felt), "tokens"),
        "wrong": (sum(len(trial.wrong) for trial in felt), "requests"),
        "leaked": (sum(bool(trial.leaked) for trial in felt), "trials"),
        "broken": (sum(len(trial.broken) for trial in felt), "promises"),
    }
    lines = [line(f"trials_{row.name}", len(felt), "trials", len(trials))]
    lines += [line(f"{name}_{row.name}", value, unit, 0, at_most=True) for name, (value, unit) in counts.items()]
    lines.append(line(f"refused_{row.name}", sum(trial.num_refused for trial in felt), "tries"))
    gaps = [gap for trial in felt for gap in trial.gaps]
    if row.has_gap:
        lines.append(line(f"gap_p99_s_{row.name}", percentile(gaps, 0.99) if gaps else None, "s", GAP_SECONDS, at_most=True))
    return lines


async def main(options: argparse.Namespace) -> int:
    """1 where a figure misses its target."""
    chosen = [row for row in ROWS if not options.rows or row.name in options.rows]
    held = True
    async with running() as fleet:
        traffic = Traffic(fleet)
        for row in chosen:
            num_trials = options.trials or (row.long if options.long else row.trials)
            if not num_trials:
                continue
            for figure in figures(row, await run_row(fleet, traffic, row, num_trials, options.seed)):
                show(figure)
                held &= figure["holds"] is not False
        await traffic.close()
    return 0 if held else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--rows", nargs="*", metavar="F01", help="which rows; all without")
    parser.add_argument("--trials", type=int, default=0, help="of each row; as the table says without")
    parser.add_argument("--long", action="store_true", help="the rows of make chaos-long, 100 trials each")
    parser.add_argument("--seed", type=int, default=1)
    sys.exit(asyncio.run(main(parser.parse_args())))
