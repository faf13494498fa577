"""`moreh-ap doctor --hosts`: whether hosts can join, without starting a worker.

Also measures the links between hosts that can. Decides how what was found is shown, and the exit status. Must not know
how hosts are looked at.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from moreh_ap.hosts import host_table, joining_checks
from moreh_ap.runtime.host.host_connection import HostLostError
from moreh_ap.runtime.host.host_joining import connect, measure_links
from moreh_ap.toolkit import smi_tables


def check_hosts(hosts: Sequence[str], devices: int | None, as_json: bool) -> int:
    """Looks at hosts, shows what was found, and returns the exit status: 0 if all can join, else 1.

    Args:
        hosts: What `parse_hosts` returned.
        devices: Devices wanted of all together; None: as many as each has.
        as_json: Whether to print one JSON object instead of a table.
    """
    found = connect(hosts, None if devices is None else max(1, devices // len(hosts)))
    try:
        if all(row.ok for row in found.rows):
            found.rows += measure_links(found)
    except HostLostError as error:
        found.rows.append(joining_checks.lost(error.host, str(error)))
    finally:
        found.end()
    ok = all(row.ok for row in found.rows)
    if as_json:
        print(json.dumps({"ok": ok, "hosts": [asdict(row) for row in found.rows]}, indent=1))
    else:
        host_table.show(found.rows, smi_tables.console())
    return 0 if ok else 1
