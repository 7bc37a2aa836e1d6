"""The mutants fit the code, and the tests find more than 95% of them."""

from itertools import groupby

import pytest

from tests.mutation.mutants import MUTANTS, Mutant
from tests.mutation.runner import PACKAGE, ROOT, Verdict, fails_without_mutants, judged

SHARE = 0.95


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_fits_its_file(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.old != mutant.new
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") if name else (ROOT / file).is_file()


def test_names_are_unique() -> None:
    names = sorted(mutant.name for mutant in MUTANTS)
    assert [name for name, same in groupby(names) if len(list(same)) > 1] == []


@pytest.mark.long
def test_mutants_are_found() -> None:
    assert (failure := fails_without_mutants()) is None, failure
    outcomes = list(judged(MUTANTS))
    missed = [f"{outcome.mutant.name}: {outcome.verdict.value}" for outcome in outcomes if outcome.verdict is not Verdict.FOUND]
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} mutants were found", *missed, sep="\n")
    assert len(missed) < (1 - SHARE) * len(outcomes), "\n".join(missed)
