"""The notebooks run from top to bottom, and what they claim holds."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
nbformat = pytest.importorskip("nbformat", reason="needs the extra 'notebooks'")
nbclient = pytest.importorskip("nbclient", reason="needs the extra 'notebooks'")
pytest.importorskip("ipykernel", reason="needs the extra 'notebooks'")


def run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    """The cells of a notebook after it ran in a fresh kernel of this very Python."""
    spec = tmp_path / "kernels" / "this_python"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.joinpath("kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": "this Python", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="this_python", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    return notebook.cells


def printed(cells: list) -> str:
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs if output.output_type == "stream")


def test_replace_pyg_layers(tmp_path, monkeypatch):
    cells = run("01_replace_pyg_layers.ipynb", tmp_path, monkeypatch)
    text = printed(cells)
    assert float(re.search(r"difference of the outputs: (\S+)", text).group(1)) < 1e-5
    assert float(re.search(r"difference of a loss: (\S+)", text).group(1)) < 1e-3
    assert "2 of 2 message-passing layers run fused" in text
    accuracies = [float(value) for value in re.findall(r"test accuracy (\S+)%", text)]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=1.0)
    assert min(accuracies) > 60
    assert re.search(r"'plain': 0\} \{\}", text)
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))


def test_write_your_own_layer(tmp_path, monkeypatch):
    cells = run("02_write_your_own_layer.ipynb", tmp_path, monkeypatch)
    text = printed(cells)
    assert float(re.search(r"difference of result and gradients: (\S+)", text).group(1)) < 1e-4
    assert "after reorganize:" in text
    assert "hoisted, once per vertex" in text
    assert "warned: True" in text
    assert "counted: {'fused': 0, 'plain': 1}" in text
    assert re.search(r"RankedConv.propagate\n  .*torch.sort\(x_j, dim=0\)", text)
    assert "NotFusedError: Expected every message-passing layer to run fused" in text
    losses = [float(value) for value in re.findall(r"-> (\S+)  test", text)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-2)
    assert max(losses) < 1
    assert float(re.search(r"difference of a loss: (\S+)", text).group(1)) < 1e-3
    assert re.search(r"'plain': 0\} \{\}", text)
    shown = [output.data["text/html"] for cell in cells for output in cell.get("outputs", []) if "data" in output]
    assert any("<svg" in page for page in shown)


def test_one_graph_many_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cells = run("03_one_graph_many_gpus.ipynb", tmp_path, monkeypatch)
    text = printed(cells)
    cut = {method: float(share) for method, share in re.findall(r"(\w+) +vertices .* cut (\S+)%", text)}
    assert cut["metis"] < cut["locality"] < cut["random"]
    rows = {method: json.loads(found) for method, found in re.findall(r"(\w+) +rows .* halo (.*), by ", text)}
    assert sum(rows["metis"]) < sum(rows["locality"]) < sum(rows["random"])
    assert len(re.findall(r"^  (?:halo|broadcast): .* ms, \d+ rows \(", text, re.MULTILINE)) == 2 * len(cut)
    differences = [float(value) for pair in re.findall(r"of a loss: (\S+) of a score: (\S+)", text) for value in pair]
    assert len(differences) == 4
    assert max(differences) < 1e-10
    assert float(re.search(r"accuracy of the others (\S+)%", text).group(1)) > 75
    assert len(re.findall(r"^conv2: sum by destination, (?:broadcast|halo): ", text, re.MULTILINE)) == 2
    shown = [output["data"] for cell in cells for output in cell.get("outputs", []) if "data" in output]
    assert len([data for data in shown if "image/png" in data]) == 3


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebook_is_stored_without_outputs(path):
    """Outputs in git grow old and hide the code in every change."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
