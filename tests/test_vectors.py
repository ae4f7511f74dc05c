"""Files of vectors as other programs write them, and what ``torchcpl select`` prints and writes."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from torchcpl.cli import main
from torchcpl.vectors import read_image, read_vectors

X = np.random.default_rng(0).normal(size=(12, 3)).round(3)


def csv(header: list[str], *columns: list[str]) -> str:
    rows = zip(*columns, *X.astype(str).T, strict=True)
    return "\n".join([",".join(header), *(",".join(row) for row in rows)])


NAMES = [f"n{i}" for i in range(len(X))]
INDEX = [str(3 * i) for i in range(len(X))]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (csv(["", "0", "1", "2"], INDEX), INDEX),  # DataFrame.to_csv
        (csv(["", "id", "a", "b", "c"], INDEX, NAMES), NAMES),
        (csv(["0", "1", "2"]), [str(i) for i in range(len(X))]),  # DataFrame.to_csv(index=False)
    ],
)
def test_the_index_and_the_numbered_columns_of_pandas_are_no_data(tmp_path: Path, text: str, ids: list[str]) -> None:
    (tmp_path / "x.csv").write_text(text)
    found = read_vectors(tmp_path / "x.csv")
    assert np.array_equal(found.values, X)
    assert [found.name(row) for row in range(len(found))] == ids


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("header", ["a,b,c\n", ""])
def test_cells_between_commas_semicolons_or_tabs(tmp_path: Path, mark: str, header: str) -> None:
    text = header + "\n".join(",".join(row) for row in X.astype(str))
    (tmp_path / "x.csv").write_text(text.replace(",", mark))
    assert np.array_equal(read_vectors(tmp_path / "x.csv").values, X)


@pytest.mark.parametrize("start", ['id;"a, b";c', "id;a, b;c", "id\ta, b\tc;d", "\n\nid;a;b"])
def test_a_comma_in_the_name_of_a_column(tmp_path: Path, start: str) -> None:
    mark = "\t" if "\t" in start else ";"
    rows = [mark.join([f"r{i}", *row]) for i, row in enumerate(X[:, :2].astype(str))]
    (tmp_path / "x.csv").write_text("\n".join([start, *rows]))
    found = read_vectors(tmp_path / "x.csv")
    assert np.array_equal(found.values, X[:, :2])
    assert found.name(1) == "r1"


@pytest.mark.parametrize("header", ["a;b\n", ""])
def test_decimal_commas_are_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "x.csv").write_text(header + "1,5;2,5\n3,5;4,5\n")
    with pytest.raises(ValueError, match=r"expected numbers in column '.*', got '[13],5' in row 0"):
        read_vectors(tmp_path / "x.csv")


@pytest.mark.parametrize("ids", [np.array("x"), np.arange(8).reshape(4, 2)])
def test_ids_of_another_shape(tmp_path: Path, ids: np.ndarray) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros((4, 2)), ids=ids)
    with pytest.raises(ValueError, match=r"x\.npz: ids: expected \(N,\), got shape"):
        read_vectors(tmp_path / "x.npz")


def test_the_index_of_pandas_in_parquet_is_no_data(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "__index_level_0__": list(map(int, INDEX))}
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    found = read_vectors(tmp_path / "x.parquet")
    assert np.array_equal(found.values, X)
    assert found.ids == INDEX


@pytest.mark.parametrize("name", ["id", "number", None])
def test_the_index_of_pandas_in_parquet_may_have_a_name(tmp_path: Path, name: str | None) -> None:
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X, columns=list("abc"), index=pandas.Index(list(map(int, INDEX)), name=name))
    table.to_parquet(tmp_path / "x.parquet")
    found = read_vectors(tmp_path / "x.parquet")
    assert np.array_equal(found.values, X)
    assert found.ids == INDEX


@pytest.mark.parametrize("text", ["0,1\n0.5,0.25\n1.5,2.0\n", "0\n0.5\n1.5\n"])
def test_a_first_row_that_may_be_a_header_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=r"x\.csv: expected names of columns, or a first row with points too, got 0"):
        read_vectors(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text(text.replace(".", ""))
    assert len(read_vectors(tmp_path / "x.csv")) == 3


def test_a_column_without_a_name_is_no_index_but_the_first(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b,\n1,2,3\n4,5,6\n")
    with pytest.raises(ValueError, match="expected a name for every column, got 'a', 'b', ''"):
        read_vectors(tmp_path / "x.csv")


def test_endings_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "X.CSV").write_text(csv(["a", "b", "c"]))
    assert np.array_equal(read_vectors(tmp_path / "X.CSV").values, X)


def test_an_npz_by_the_name_of_an_npy(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", features=X)
    (tmp_path / "x.npz").rename(tmp_path / "x.npy")
    assert np.array_equal(read_vectors(tmp_path / "x.npy").values, X)


def test_a_column_that_a_npy_does_not_have(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(ValueError, match="expected --column, one of array, got 'vector'"):
        read_vectors(tmp_path / "x.npy", column="vector")


@pytest.mark.parametrize("shape", [(12,), (12, 1)])
def test_weights_from_a_file(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "w.npy", np.where(np.arange(12) == 7, 50.0, 0.0).reshape(shape))
    out = tmp_path / "picks.npy"
    command = ["select", str(tmp_path / "x.npy"), "--size", "1", "--weights", str(tmp_path / "w.npy")]
    assert main([*command, "--out", str(out)]) == 0
    assert np.load(out).tolist() == [7]


def test_weights_that_are_neither_a_column_nor_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_text(csv(["a", "b", "c"]))
    assert main(["select", str(tmp_path / "x.csv"), "--weights", "quality"]) == 2
    assert "--weights: expected a column of" in capsys.readouterr().err


def test_json_is_numbers_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", X)
    assert main(["select", str(tmp_path / "x.npy"), "--json", "--out", str(tmp_path / "picks.csv")]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(0 < row["probability"] <= 1 for row in rows)


def test_nothing_is_written_before_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", X)
    out, file = tmp_path / "picks.npy", tmp_path / "file"
    file.write_text("")
    assert main(["select", str(tmp_path / "x.npy"), "--hypotheses", "2", "--out", str(out)]) == 2
    assert "picks.npy: expected one of .csv, .json, .parquet" in capsys.readouterr().err
    for folder, said in ((tmp_path, "expected another path to write to"), (file, "--copy: expected a folder")):
        assert main(["select", str(tmp_path), "--out", str(out), "--copy", str(folder)]) == 2
        assert said in capsys.readouterr().err
    assert main(["select", str(tmp_path / "x.npy"), "--out", str(tmp_path / "x.npy")]) == 2
    assert np.array_equal(np.load(tmp_path / "x.npy"), X)
    assert main(["select", str(tmp_path / "x.npy"), "--sheet", str(out), "--out", str(out)]) == 2
    np.save(tmp_path / "w.npy", X[:, 0])
    given = ["select", str(tmp_path / "x.npy"), "--weights", str(tmp_path / "w.npy")]
    assert main([*given, "--out", str(tmp_path / "w.npy")]) == 2
    assert np.array_equal(np.load(tmp_path / "w.npy"), X[:, 0])
    capsys.readouterr()
    for sheet in (tmp_path, file / "sheet.html"):
        assert main([*given, "--out", str(out), "--sheet", str(sheet)]) == 2
        assert f"{sheet}: expected a file in a folder" in capsys.readouterr().err
    assert not out.exists()


def test_a_page_in_place_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "subsets", "no-run", "--out", str(tmp_path / "r"), "--explore", str(tmp_path / "r")]) == 2
    assert "expected another path to write to" in capsys.readouterr().err


def test_fewer_answers_than_hypotheses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", X[:1])
    assert main(["select", str(tmp_path / "x.npy"), "--hypotheses", "3", "--json"]) == 0
    assert [row["row"] for row in json.loads(capsys.readouterr().out)["rows"]] == [0]


def test_nothing_is_written_where_a_page_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(600, 3)))
    out, page = tmp_path / "picks.csv", tmp_path / "page.html"
    assert main(["select", str(tmp_path / "x.npy"), "--size", "2", "--out", str(out), "--explore", str(page)]) == 2
    said = capsys.readouterr()
    assert "--explore: expected at most 512 rows, got 600" in said.err
    assert not said.out
    assert not out.exists()


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "torchcpl", "completion"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a": 1' + 400 * "0" + "}", "expected numbers in column 'a'"),
        ("[1" + 400 * "0" + "]", "vector: expected vectors of numbers"),
    ],
)
def test_integers_beyond_float64(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(ValueError, match=said) as error:
        read_vectors(tmp_path / "x.jsonl")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_a_superscript_is_no_row_number(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(ValueError, match="id: expected one of the file's 12 rows, got '²'"):
        read_vectors(tmp_path / "x.npy").row("²")


def test_images_that_cannot_be_read(tmp_path: Path) -> None:
    pytest.importorskip("cv2")

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)  # 10¹⁰ pixels
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    (tmp_path / "empty.png").touch()
    (tmp_path / "dangling.png").symlink_to("nowhere.png")
    (tmp_path / "folder.png").mkdir()
    for path in tmp_path.iterdir():
        assert read_image(path, 32) is None, path


def test_scale_and_shift_beside_the_rows_apply(tmp_path: Path) -> None:
    stored, scale, shift = np.arange(12, dtype=np.uint8).reshape(4, 3), np.array([1.0, 2.0, 0.5]), np.float64(3)
    np.savez(tmp_path / "x.npz", rows=stored, scale=scale, shift=shift)
    np.testing.assert_allclose(read_vectors(tmp_path / "x.npz").values, stored * scale + shift)
    np.savez(tmp_path / "x.npz", rows=stored, scale=scale[:2])
    with pytest.raises(ValueError, match="rows: scale: expected"):
        read_vectors(tmp_path / "x.npz")


def test_options_of_images_are_refused_for_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(ValueError, match="--resnet: expected a folder of images"):
        read_vectors(tmp_path / "x.npy", resnet="weights.safetensors")
    with pytest.raises(ValueError, match="--strict: expected a folder of images"):
        read_vectors(tmp_path / "x.npy", strict=True)
    with pytest.raises(ValueError, match="--column: expected a file"):
        read_vectors(tmp_path, column="v")
