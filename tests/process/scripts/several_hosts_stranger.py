"""Tries to run code on a host whose engine listens at an address that it even knows.

usage: several_hosts_stranger.py ADDRESS ANSWERS, with the engine's variables for what it shows.
"""

import os
import sys

import monarch.actor as ma


class Stranger(ma.Actor):
    @ma.endpoint
    def run(self):
        return os.getpid()


if __name__ == "__main__":
    address, answers = sys.argv[1:]
    ma.unhandled_fault_hook = lambda failure: None
    ma.enable_transport(answers)
    host = ma.attach_to_workers(ca="trust_all_connections", workers=[address])
    try:
        host.initialized.get(timeout=10.0)
        actor = host.spawn_procs(per_host={"gpus": 1}).spawn("stranger", Stranger)
        print("RAN in", next(iter(actor.run.call().get(timeout=20.0).values())), flush=True)
    except Exception as error:
        print("REFUSED", type(error).__name__, flush=True)
    os._exit(0)
