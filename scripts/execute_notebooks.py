"""Runs the notebooks of tutorials/notebooks from the top and keeps what they print and draw.

    python scripts/execute_notebooks.py                    # all
    python scripts/execute_notebooks.py quick_start        # some

For who has changed a notebook, or something whose numbers one of them shows. `make notebooks` then compares. Decides
what of a run is kept: outputs, and nothing about when or where. A notebook with a failing cell, or with anything on
standard error, is left as it was.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parents[1] / "tutorials" / "notebooks"
CELL_TIMEOUT_S = 240
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # of tqdm, where there are no ipywidgets
}
"""CPU workers everywhere, as `make notebooks` has them."""

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT_OF_CELLS = ("alt",)
"""What a cell's metadata may hold: `alt` says in words what its picture shows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks, without .ipynb (default: all)")
    names = parser.parse_args().names
    paths = [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb"))
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        parser.error(f"not in {FOLDER}: {', '.join(missing)}")
    os.environ.update(ENVIRONMENT)
    failed = [path.name for path in paths if not execute(path)]
    if failed:
        print(f"failed, and left as they were: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def execute(path: Path) -> bool:
    """Returns whether a notebook ran well; its file then has the new outputs."""
    print(f"{path.name} ...", flush=True)
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        print(error, file=sys.stderr)
        return False
    complaints = [text for cell in notebook.cells for text in errors_of(cell)]
    if complaints:
        print("on standard error:", *complaints, sep="\n", file=sys.stderr)
        return False
    tidy(notebook)
    nbformat.write(notebook, path)
    return True


def errors_of(cell: nbformat.NotebookNode) -> list[str]:
    """Returns what a cell has written to standard error."""
    outputs = cell.get("outputs", [])
    return [out.text for out in outputs if out.output_type == "stream" and out.name == "stderr"]


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Removes from a notebook that ran whatever is about this machine or this run."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in KEPT_OF_CELLS if key in cell.metadata})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})


if __name__ == "__main__":
    sys.exit(main())
