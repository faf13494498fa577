"""Commands as tests run them, and tables as they write them."""

from __future__ import annotations

import argparse
import csv

from moreh_ap.cli import plan_command

LARGE = ["Llama3-70B", "--devices", "64xMI250", "--global-batch", "512", "--seq-len", "1024"]


def parser_of(module):
    """Returns a command's own parser, which knows its flags."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser


def command(module, *words):
    return module.run(parser_of(module).parse_args([str(word) for word in words]), [])


def parse(*arguments):
    return parser_of(plan_command).parse_args(arguments)


def show(capsys, *arguments):
    assert plan_command.run(parse(*arguments), []) == 0
    return capsys.readouterr().out


def write(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
