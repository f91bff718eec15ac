"""A fixed slice of the fuzz; ``make fuzz`` runs thousands of cases."""

import pytest

from support import fuzz


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    fuzz.build_sandbox(folder / "sandbox")
    return folder / "sandbox"


@pytest.mark.parametrize("number", range(15))
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_bad_input_ends_in_an_error_that_names_its_fix(sandbox, kind, number):
    failure = fuzz.run_case(kind, number, 0, sandbox)
    assert failure is None, str(failure)


def test_a_time_limit_cuts_all_kinds_alike(monkeypatch, capsys):
    clock, served = iter(range(100)), []

    def supervise(folder, kind, first, last, seed, counts):
        served.append((kind, first, last))
        counts[kind] += last - first
        return [], last

    monkeypatch.setattr(fuzz, "build_sandbox", lambda folder: None)
    monkeypatch.setattr(fuzz, "_supervise", supervise)
    monkeypatch.setattr(fuzz.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr("sys.argv", ["fuzz", "--cases", "130", "--first", "7", "--seconds", "3"])
    with pytest.raises(SystemExit) as left:
        fuzz.main()
    assert not left.value.code and served == [(kind, at, at + 50) for at in (7, 57) for kind in fuzz.KINDS]
    assert "100 command cases, 100 file cases, 100 call cases: 0 failures" in capsys.readouterr().out


def test_a_failure_is_noticed(sandbox, monkeypatch):
    monkeypatch.chdir(sandbox)
    crash = fuzz.check_words(["ls", "norms"], "ls", "sound")
    monkeypatch.setattr("advnorm.cli.listing.norms", lambda pattern: 1 / 0)
    assert crash is None and "exit status 70" in str(fuzz.check_words(["ls", "norms"], "ls", "broken"))
