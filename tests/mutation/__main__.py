"""`python -m tests.mutation`: plant the named mutants, or all, and say which of them the tests find."""

import sys

from tests.mutation.runner import main

sys.exit(main(sys.argv[1:]))
