"""`python -m kvmem.cli` is the console command `kvmem`."""

import sys

from kvmem.cli import main

sys.exit(main())
