"""Variables that the script sets after its workers were started."""

from __future__ import annotations

from moreh_ap.protocol.script_code.script_environment import ScriptEnvironment


def test_what_was_set_or_changed_is_told_once():
    environment = ScriptEnvironment({"HOME": "/root", "KERAS_BACKEND": "jax"})
    present = {"HOME": "/root", "KERAS_BACKEND": "torch", "DDE_BACKEND": "pytorch"}
    assert environment.news(present) == (("DDE_BACKEND", "pytorch"), ("KERAS_BACKEND", "torch"))
    assert environment.news(present) == () == environment.news({})


def test_what_each_process_has_for_itself_is_left_out():
    own = {"RANK": "0", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "", "MOREH_PLAN": "replicate=2", "TMPDIR": "/tmp"}
    assert ScriptEnvironment({}).news(own) == ()
