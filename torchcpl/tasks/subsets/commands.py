"""The subsets task as the command line knows it."""

from pathlib import Path

from torchcpl.tasks.subsets.figures import demo, report
from torchcpl.tasks.subsets.results import NAMES, RULES, SCORES, bench, evaluate, make_task, table
from torchcpl.tasks.subsets.task import SubsetsConfig

CONFIG = SubsetsConfig
METHODS = tuple(NAMES)
COLUMNS = SCORES
PACKAGE = Path(__file__).parent
SUMMARY = "representative subsets: one member of every class in a bag"

__all__ = [
    "COLUMNS", "CONFIG", "METHODS", "PACKAGE", "RULES", "SUMMARY", "bench", "demo", "evaluate", "make_task", "report",
    "table",
]  # fmt: skip
