"""`python -m cachefs.contract INCLUDES`: writes INCLUDES/common/contract.h."""

import sys
from pathlib import Path

from cachefs.contract.c_header import write

if __name__ == "__main__":
    write(Path(sys.argv[1]))
