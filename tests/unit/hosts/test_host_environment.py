"""Which variables workers of other hosts get."""

from __future__ import annotations

from moreh_ap.hosts.host_environment import passed_on


def test_settings_of_libraries_are_passed_on_and_nothing_else():
    given = {
        "NCCL_DEBUG": "INFO",
        "HF_HOME": "/data",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_TOKEN": "secret",
        "TORCH_AUTH": "secret",
        "NCCL_API_KEY": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HOME": "/root",
        "MOREH_HOSTS": "a,b",
        "MY_OWN": "1",
    }
    assert passed_on(given) == {"NCCL_DEBUG": "INFO", "HF_HOME": "/data", "TOKENIZERS_PARALLELISM": "false"}
