"""Every operation's cases through the chosen implementations, judged by the oracle."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from liger_validate import devices
from liger_validate.implementations import IMPLEMENTATIONS, plain_of, run
from liger_validate.judge import ULP, Error, Results, limit_of, limit_of_pair
from liger_validate.peers import NotOffered
from liger_validate.problems import Problem, problems

OFF = ("FAIL", "ERROR")
NAN = math.nan


@dataclass(frozen=True)
class Row:
    """One result of one case by one implementation, and what the judge says of it.

    Attributes:
        rms, largest: the errors against the oracle; ulp: the largest in units of the last place of
            the largest exact value.
        plain_rms, plain_largest: those of the plain version in the same framework.
        ratio: rms over plain_rms.
        apart: the largest difference from another implementation, over the largest exact value;
            apart_ulp: the same in units of the last place, of the coarser of both dtypes;
            apart_from: which one that is, None if there is no other.
        repeatable: whether a second run gave the same bits.
        verdict: "pass", "FAIL", "ERROR", "not offered", or "plain" for the plain versions, which
            are the yardstick.
    """

    op: str
    case: str
    dtype: str
    result: str
    implementation: str
    rms: float = NAN
    largest: float = NAN
    ulp: float = NAN
    plain_rms: float = NAN
    plain_largest: float = NAN
    ratio: float = NAN
    apart: float = NAN
    apart_ulp: float = NAN
    apart_from: str | None = None
    repeatable: bool | None = None
    verdict: str = "ERROR"
    message: str = ""


@dataclass(frozen=True)
class _Runs:
    """What an implementation gave in two runs, or why it gave nothing."""

    first: Results
    second: Results
    verdict: str = ""
    message: str = ""


def validate(
    ops: Iterable[str],
    dtypes: Iterable[str] = (),
    cases: Iterable[str] = (),
    implementations: Iterable[str] = IMPLEMENTATIONS,
    seed: int = 0,
    place: devices.Place | None = None,
) -> Iterator[Row]:
    """Rows of the table, case by case."""
    names = list(implementations)
    for op in ops:
        for problem in problems(op, dtypes, cases, seed):
            yield from rows_of(problem, names, place)


def rows_of(
    problem: Problem, implementations: Iterable[str], place: devices.Place | None = None
) -> Iterator[Row]:
    """Rows of one problem; kernels and peers are judged beside their framework's plain version."""
    names, place = list(implementations), place or devices.find(None)
    needed = dict.fromkeys(n for name in names for n in (plain_of(name), name))
    runs = {name: _twice(problem, name, place) for name in needed}
    rows: dict[str, list[Row]] = {name: [] for name in names}
    for name in names:
        label = Row(problem.op, problem.name, problem.dtype, "", name)
        plain = runs[plain_of(name)]
        if runs[name].verdict:
            failed = runs[name]
            rows[name] = [replace(label, verdict=failed.verdict, message=failed.message)]
        elif plain.verdict:
            rows[name] = [replace(label, message=f"{plain_of(name)}: {plain.message}")]
    solved = {name: runs[name] for name in names if not rows[name]}
    for result in problem.exact:
        for row in _rows_of_result(problem, result, solved, runs):
            rows[row.implementation].append(row)
    return itertools.chain.from_iterable(rows.values())


def _twice(problem: Problem, name: str, place: devices.Place) -> _Runs:
    try:
        return _Runs(run(problem, name, place), run(problem, name, place))
    except NotOffered as error:
        return _Runs({}, {}, "not offered", str(error))
    except Exception as error:  # what an implementation raises is a finding, not the end
        return _Runs({}, {}, "ERROR", f"{type(error).__name__}: {error}")


def _rows_of_result(
    problem: Problem, result: str, solved: Mapping[str, _Runs], runs: Mapping[str, _Runs]
) -> list[Row]:
    exact = problem.exact[result]
    rows = {}
    for name, found in solved.items():
        actual, plain = found.first[result], runs[plain_of(name)].first[result]
        error, base = Error.between(actual, exact), Error.between(plain, exact)
        dtype, plain_dtype, message = actual.dtype.name, plain.dtype.name, ""
        limit = limit_of(base, dtype)
        verdict = "plain" if name == plain_of(name) else "pass"
        if dtype != plain_dtype:
            verdict, message = "FAIL", f"dtype {dtype}, the plain version's {plain_dtype}"
        elif not np.all(np.isfinite(actual.astype(np.float32))):  # whatever the yardstick's are
            verdict, message = "FAIL", "not all finite"
        elif not error.within(limit):
            verdict, message = "FAIL", f"limits {limit.rms:.3e} and {limit.largest:.3e}"
        rows[name] = Row(
            *(problem.op, problem.name, problem.dtype, result, name),
            rms=error.rms,
            largest=error.largest,
            ulp=error.largest / ULP[dtype],
            plain_rms=base.rms,
            plain_largest=base.largest,
            ratio=error.rms / base.rms if base.rms else (1.0 if error.rms == 0.0 else math.inf),
            repeatable=actual.tobytes() == found.second[result].tobytes(),
            verdict=verdict,
            message=message,
        )
    for pair in itertools.combinations(rows, 2):
        first, second = (solved[name].first[result] for name in pair)
        apart = Error.between(first, second, exact)
        dtype = max(first.dtype.name, second.dtype.name, key=ULP.__getitem__)
        bases = [Error(rows[name].plain_rms, rows[name].plain_largest) for name in pair]
        limit = limit_of_pair(bases, dtype)
        # One that the oracle has failed is not the other's fault.
        both_pass = all(rows[name].verdict == "pass" for name in pair)
        for name, other in (pair, pair[::-1]):
            row = rows[name]
            if row.apart_from is None or apart.largest > row.apart:
                row = replace(
                    row,
                    apart=apart.largest,
                    apart_ulp=apart.largest / ULP[dtype],
                    apart_from=other,
                )
            if both_pass and not apart.within(limit):
                message = f"apart from {other} by {apart.rms:.3e} and {apart.largest:.3e}, limits "
                message += f"{limit.rms:.3e} and {limit.largest:.3e}"
                row = replace(row, verdict="FAIL", message=message)
            rows[name] = row
    return list(rows.values())
