"""A host with cgroup v2 only.

The test runs in a mount namespace that hides every other hierarchy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launcher import ROOT
from tests.support.paging import skip_unless_swap

BALLAST = Path(__file__).with_name("ballast.py")
MIB = 1 << 20
ONLY_V2 = "umount -R -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec "
PROGRAM = """
import asyncio, json, subprocess, sys, time, uuid
from services.nodeagent.suspend.cpu import PageOut
from services.nodeagent.suspend.cgroups import hierarchies, open_cgroups
from services.nodeagent.suspend.port import Target

tree = subprocess.Popen([sys.executable, sys.argv[1], "60", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def line(word=""):
    if word:
        print(word, file=tree.stdin, flush=True)
    return tree.stdout.readline().strip()

async def there_and_back(groups):
    way = PageOut(groups)
    assert not way.explain_unavailable(), way.explain_unavailable()
    assert line() == "ready"
    before = line("digest")
    target = Target("i", "vllm", ("cpu:0",), groups.gather("i", tree.pid, include_host=True))
    taken = await way.suspend(target)
    frozen = groups.is_frozen("i")
    await way.resume(target)
    return {"frozen": frozen, "freed": taken.freed_bytes / taken.used_bytes, "same": line("digest") == before}

groups = open_cgroups(f"t{uuid.uuid4().hex[:6]}")
try:
    result = asyncio.run(there_and_back(groups))
finally:
    groups.kill("i")
    tree.wait()
    while not groups.remove("i"):
        time.sleep(0.01)
print(json.dumps({"versions": [f.version for f, _ in hierarchies()], "version": groups.version, **result}))
"""


def test_engines_are_suspended_on_a_host_with_cgroup_v2_only() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare for a mount namespace")
    skip_unless_swap()
    inside = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*inside, f"{ONLY_V2} true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("cgroup v2 cannot be mounted here")
    command = [*inside, f'{ONLY_V2} "$@"', "sh", sys.executable, "-c", PROGRAM, str(BALLAST)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    assert (reported["versions"], reported["version"]) == ([2], 2)
    assert reported["frozen"]
    assert reported["same"]
    assert reported["freed"] >= 0.75
