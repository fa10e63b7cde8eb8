"""`kvbench verify` and `kvbench rerun` on a real run: what was tampered with is found, and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from kvbench.audit.rerun import rerun
from kvbench.audit.verify import verify
from kvbench.cli import main as cli
from kvbench.cli.options import FAILED
from kvbench.contract.identity import AXES
from kvbench.errors import BadInput, StoreError
from kvbench.model.open import OpenModel
from kvbench.show.plot import plot
from kvbench.show.table import render
from kvbench.stats.aggregate import aggregate
from kvbench.store.manifest import MANIFEST
from kvbench.store.results import ROWS, SCHEMA, read_rows
from kvbench.study.workload import Workload
from tests.laws import toy
from tests.laws.runs import config, lines, recorded

Row = dict[str, Any]


@pytest.fixture(scope="module")
def original(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two invocations and two seeds, with figures."""
    out = tmp_path_factory.mktemp("original") / "run"
    with toy.added():
        recorded(config(folder, out, policies=("knorm", "laws_faulty:after=30"), budgets=(8, 200), limit=2))
        recorded(config(folder, out, policies=("random",), budgets=(8,), seeds=(0, 1)))
    plot(out, "accuracy,kl")
    return out


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy to spoil."""
    with toy.added():
        yield Path(shutil.copytree(original, tmp_path / "run"))


def broken(run: Path, **options: Any) -> dict[str, str]:
    """Laws that fail, with their details."""
    return {found.law: found.detail for found in verify([run], **options) if not found.passed}


def change(run: Path, spoil: Callable[[list[Row]], None]) -> None:
    rows = [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]
    spoil(rows)
    (run / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def evicted(rows: list[Row]) -> Row:
    return next(row for row in rows if row["budget"] == 8 and row["status"] == "ok")


def test_an_honest_run_passes_every_check(run: Path) -> None:
    assert broken(run, sources=True) == {}
    assert sum(row["status"] == "failed" for row in lines(run)) > 0  # failed rows are no fault of the folder
    assert (
        len(list(verify([run], sources=True))) == 5 + 1 + 2 * 3 + 4 + 4
    )  # of the last four: three policies and a task


SPOILT: dict[str, tuple[Callable[[list[Row]], None], str, str]] = {
    "kept is another number": (
        lambda rows: evicted(rows).update(kept=9), "kept pairs are the budget", "kept 9 of"
    ),
    "the budget was relabelled": (
        lambda rows: evicted(rows).update(budget=9, kept=9), "key and config", "do not give config"
    ),
    "the policy was relabelled": (
        lambda rows: evicted(rows).update(policy="tova"), "key and config", "do not give config"
    ),
    "the sample was relabelled": (
        lambda rows: evicted(rows).update(sample="77"), "key and config of every row", "config and sample"
    ),
    "a key was made up": (
        lambda rows: evicted(rows).update(key="0" * 16), "key and config of every row", "config and sample"
    ),
    "a spec was relabelled": (
        lambda rows: evicted(rows).update(spec="snapkv"), "every row belongs", "no policy 'snapkv'"
    ),
    "another model's row": (
        lambda rows: evicted(rows).update(model="m"), "every row belongs", "of model m"
    ),
    "another task's row": (
        lambda rows: evicted(rows).update(task_spec="boolq"), "every row belongs", "no data of 'boolq'"
    ),
    "a metric beyond its limits": (
        lambda rows: evicted(rows)["metrics"].update(agreement=1.5), "every metric", "agreement is 1.5"
    ),
    "a metric that is no number": (
        lambda rows: evicted(rows)["metrics"].update(kl=float("nan")), "every metric", "kl is nan"
    ),
    "a time that runs backwards": (
        lambda rows: evicted(rows)["times"].update(answer_s=-1.0), "every metric", "answer_s is -1.0"
    ),
    "a row twice": (
        lambda rows: rows.append(dict(evicted(rows))), "every line of rows.jsonl", "is there twice"
    ),
    "a figure of other rows": (
        lambda rows: evicted(rows)["metrics"].update(kl=3.0), "says what the rows say", "in the rows"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_what_was_spoilt_is_named(run: Path, name: str) -> None:
    spoil, law, detail = SPOILT[name]
    change(run, spoil)
    found = broken(run)
    assert any(law in key and detail in told for key, told in found.items()), found


def test_a_half_line_is_named(run: Path) -> None:
    with open(run / "rows.jsonl", "ab") as file:
        file.write(b'{"key": "ab')
    assert (
        "half written (11 bytes)"
        in broken(run)["every line of rows.jsonl is a row, and every row is there once"]
    )


def test_images_belong_to_their_numbers(run: Path) -> None:
    figures = run / "figures"
    name = "laws_toy-kl"
    (figures / f"{name}.svg").write_bytes((figures / "laws_toy-accuracy.svg").read_bytes())
    assert any("drawn from other numbers" in told for told in broken(run).values())
    (figures / f"{name}.png").unlink()
    (figures / f"{name}.svg").unlink()
    assert any(f"{name}.svg is missing" in told for told in broken(run).values())
    (figures / "mine.svg").write_text("<svg/>")
    assert any("mine.svg: draw it again" in told for told in broken(run).values())


def test_tables_follow_from_the_rows(run: Path, tmp_path: Path) -> None:
    frame = aggregate(read_rows(run), ["accuracy", "kl"])
    files = [tmp_path / f"table.{fmt}" for fmt in ("csv", "json")]
    for file in files:
        file.write_text(render(frame, file.suffix[1:]))
    assert broken(run, tables=files) == {}
    for file in files:
        file.write_text(
            render(frame.assign(mean=frame["mean"].where(frame["metric"] == "kl", 0.123)), file.suffix[1:])
        )
        assert any("mean is 0.123 here" in told for told in broken(run, tables=[file]).values())
    files[0].write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="is not a table of kvbench"):
        broken(run, tables=[files[0]])


def test_sources_that_changed_are_named(run: Path) -> None:
    other = toy.Toy._sample
    with patch.object(
        toy.Toy, "samples", lambda self, setting: toy.Samples([other(self, 3)], "new", "1" * 64)
    ):
        found = broken(run, sources=True)
    assert any("1 of 1 samples have no row" in told for told in found.values())
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["fixed"]["model_sha256"] = "0" * 64
    (run / "manifest.json").write_text(json.dumps(manifest))
    found = broken(run, sources=True)
    assert any("the manifest says 0000" in told for told in found.values())
    assert any("do not give config" in told for told in found.values())  # and no row is of that model


def test_the_identity_of_a_row_is_what_the_runner_hashes(run: Path, folder: str) -> None:
    from kvbench.contract.registry import TASKS
    from kvbench.model.open import open_model
    from kvbench.study.plan import plan_task

    settings = config(folder, run)
    plan = plan_task(settings, TASKS.parse("laws_toy"), [])
    work = Workload.build(settings, plan, open_model(folder, "cpu"))
    assert set(work.configuration(plan.full)) == {axis.name for axis in AXES}


# rerun


def test_the_same_run_twice_gives_identical_rows(run: Path, tmp_path: Path) -> None:
    report = rerun(run, out=tmp_path / "again", progress=False)
    assert (report.equal, report.close, report.different, report.missing) == (len(read_rows(run)), 0, {}, [])
    assert "equal bit for bit (times aside), 0 within 0.0001" in report.text()
    assert report.text().endswith(", 0 different")
    with pytest.raises(BadInput, match="is there already"):
        rerun(run, samples=1, out=tmp_path / "again", progress=False)
    with pytest.raises(BadInput, match="is the run itself"):
        rerun(run, out=run / "figures" / "..", progress=False)


def test_a_repetition_goes_on_where_it_was(run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    rerun(run, out=again, progress=False)
    lines = (again / ROWS).read_text().splitlines()
    (again / ROWS).write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    kept = (again / ROWS).read_text()
    report = rerun(run, out=again, progress=False)
    assert (report.equal, report.different, report.missing) == (len(read_rows(run)), {}, [])
    assert (again / ROWS).read_text().startswith(kept)  # times too: nothing was computed twice
    change(again, lambda rows: evicted(rows)["metrics"].update(kl=3.0))
    report = rerun(run, out=again, progress=False)
    assert len(report.different) == 1
    assert "kl" in report.text()


def test_all_policies_are_those_of_then(run: Path, tmp_path: Path) -> None:
    manifest = json.loads((run / MANIFEST).read_text())
    for one in manifest["runs"]:
        one["settings"]["policies"] = ["all", "laws_faulty:after=30"]
    (run / MANIFEST).write_text(json.dumps(manifest))
    report = rerun(run, out=tmp_path / "again", progress=False)
    assert (report.equal + report.close, report.different, report.missing) == (len(read_rows(run)), {}, [])
    assert set(read_rows(tmp_path / "again")["spec"]) == set(read_rows(run)["spec"])


def test_what_differs_is_reported(run: Path) -> None:
    change(run, lambda rows: evicted(rows)["metrics"].update(kl=3.0))
    change(run, lambda rows: rows[0]["metrics"].update(nll=rows[0]["metrics"]["nll"] + 1e-6))
    change(run, lambda rows: rows[-1].update(label="neither", key=rows[-1]["key"]))
    change(run, lambda rows: rows[-2].update(key="f" * 16))
    report = rerun(run, progress=False)
    assert (report.close, len(report.different), report.missing) == (1, 2, ["f" * 16])
    assert any("kl 3.0 then" in told for told in report.different.values())
    assert any("label 'neither' then" in told for told in report.different.values())
    assert "1 rows did not come again, the first: ffff" in report.text()
    assert len(rerun(run, tolerance=10.0, progress=False).different) == 1  # the label


def test_a_few_samples_cost_a_few_forwards(run: Path) -> None:
    load, counted = OpenModel.load, []

    def counting(self: OpenModel) -> Any:
        lm = load(self)
        lm.model.register_forward_pre_hook(lambda *_: counted.append(1))
        return lm

    with patch.object(OpenModel, "load", counting):
        few = rerun(run, samples=1, progress=False)
        part = len(counted)
        every = rerun(run, progress=False)
    assert few.equal + every.equal > every.equal > few.equal > 0
    assert part < len(counted) - part
    groups = read_rows(run).groupby(["task_spec", "seed"])["sample"].nunique()
    repeated = few.equal
    assert repeated < len(read_rows(run)) / 2
    assert len(groups) == 4


def test_another_model_is_not_a_repetition(run: Path, tmp_path: Path) -> None:
    from tests.tiny import tiny_model

    manifest = json.loads((run / "manifest.json").read_text())
    moved = Path(shutil.copytree(manifest["fixed"]["model"], tmp_path / "model"))
    tiny_model("llama", "sdpa", seed=1).save_pretrained(moved)
    for entry in manifest["runs"]:
        entry["settings"]["model"] = str(moved)
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=r"cannot be repeated here: .*model_sha256"):
        rerun(run, progress=False)


def test_without_settings_nothing_can_be_repeated(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["runs"][0]["settings"]["of_the_future"] = 1
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="another version of kvbench"):
        rerun(run, progress=False)
    for entry in manifest["runs"]:
        del entry["settings"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="does not say with which settings"):
        rerun(run, progress=False)


def test_the_commands_exit_red_when_something_differs(run: Path) -> None:
    def invoke(*command: Any) -> Any:
        return CliRunner().invoke(cli.app, [str(part) for part in command])

    done = invoke("verify", run)
    assert (done.exit_code, done.stdout.count("ok  ")) == (0, 9)
    assert "everything checked fits together" in done.stdout
    assert invoke("rerun", run, "--samples", "1").exit_code == 0
    change(run, lambda rows: [row.update(kept=1, text="x") for row in rows if row["status"] == "ok"])  # type: ignore[func-returns-value]
    done = invoke("verify", run)
    assert done.exit_code == FAILED
    assert "FAIL  kept pairs" in done.stdout
    done = invoke("rerun", run, "--samples", "1")
    assert done.exit_code == FAILED
    assert "kept 1 then" in done.stdout
    assert invoke("rerun", run, "--samples", "0").exit_code == cli.REFUSED
    assert invoke("rerun", run, "--tolerance", "nan").exit_code == cli.REFUSED


def test_runs_of_before_there_were_settings_are_checked_as_far_as_they_go() -> None:
    """A committed folder of an older schema: no data section, no settings."""
    old = Path(__file__).parents[1] / "store" / "data" / "schema1"
    found = {item.law: item for item in verify([old])}
    assert found["key and config of every row follow from what it says"].detail.startswith(
        "2 rows are not of"
    )
    assert SCHEMA == 1


def test_several_folders_in_one_command(run: Path, tmp_path: Path) -> None:
    """A figure may show its own run or all that are named; what is no run folder is passed over."""
    other = Path(shutil.copytree(run, tmp_path / "other"))
    rows = [json.loads(line) for line in (other / "rows.jsonl").read_text().splitlines()]
    (other / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[: len(rows) // 2]))
    shutil.rmtree(other / "figures")
    plain = tmp_path / "figures"
    plain.mkdir()
    found = list(verify([run, other, plain]))
    assert [finding for finding in found if not finding.passed] == []
    assert any(str(plain) in finding.law and "no run folder" in finding.detail for finding in found)
    with pytest.raises(StoreError, match=r"no manifest\.json"):
        list(verify([plain]))
