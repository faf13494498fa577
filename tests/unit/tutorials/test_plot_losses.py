"""The plot of a training run: made from the file that the run left, or refused where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import plot_losses
import pytest


def test_a_plot_is_made_from_the_losses_of_one_run_or_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the plot; it comes with the extra `tutorials`")
    contents = {"one": {"losses": [3.0, 2.0], "held_out_before": 3.5, "held_out_after": 1.5},
                "two": {"losses": [3.0], "held_out_before": None, "held_out_after": None},
                "logged": [3.0, 2.5]}  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "losses.json").write_text(json.dumps(content))
    plot_losses.main([str(tmp_path / "one")])
    assert (tmp_path / "one" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    plot_losses.main([*(str(tmp_path / name) for name in contents), "--output", str(tmp_path / "all" / "all.png")])
    assert (tmp_path / "all" / "all.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert f"plot saved to {tmp_path / 'all' / 'all.png'}" in capsys.readouterr().out


def test_a_folder_without_losses_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plot_losses.main([str(tmp_path)])
    assert "losses.json does not exist; a training script" in capsys.readouterr().err
