"""What `cachefs doctor` says of a real CephFS."""

import json
from collections.abc import Callable

import pytest

from tests.ceph.cluster import CephFs
from tests.ceph.conftest import Dataset, check
from tests.conftest import Mount, cachefs

MakeMount = Callable[..., Mount]


@pytest.mark.parametrize("of", ["mount", "source"])
def test_it_counts_the_caps_of_the_client(cephfs: CephFs, dataset: Dataset, mount: MakeMount, of: str) -> None:
    root, files = dataset
    m = mount(root, "--read-only")
    check(m, files)
    said = cachefs("doctor", m.path if of == "mount" else root, "--json", check=False).stdout
    findings = {each["name"]: each["value"] for each in json.loads(said)}
    assert findings["source"].endswith("fuse.ceph-fuse")
    number, held = findings["CephFS caps"].split()
    assert held == "held" and int(number) > 0
