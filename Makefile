# Every target sets up .venv by itself; the stamp makes the second time quick.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
COMMA  := ,
EXTRAS := dev$(if $(shell command -v nvidia-smi 2>/dev/null),$(COMMA)cuda)

# By environment, because pip's isolated builds see no command line. Newer ones read the second for what they build with.
export PIP_CONSTRAINT       := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: setup demo test test-long test-gpu lint bench eval-reuse parity clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/nanovllm generate --model tiny --stream --max-tokens 160 "Once upon a time, in a small village by the sea,"
	$(BIN)/nanovllm generate --model tiny --chat --stream --max-tokens 200 "The capital of Aistonia is Velmora. What is the capital of Aistonia?"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/pyright

# In several processes with a thread each: threads of their own would spin for cores that the other processes need.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

# Three runs: shapes and types are checked by jaxtyping's import hook in the first; what is traced by torch.compile runs without the hook;
# Triton's interpreter, which runs the GPU's kernels on a CPU, is chosen once for all kernels when they are defined.
test: lint
	$(PYTEST) -m "not compile and not gpu and not interpret and not long" --jaxtyping-packages=nanovllm,beartype.beartype
	$(PYTEST) -m "compile and not gpu and not long"
	TRITON_INTERPRET=1 $(PYTEST) -m "interpret and not long"

# The work of minutes that `make test` leaves out.
test-long: $(STAMP)
	$(BIN)/python -m pytest -q -m "long and not gpu"

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q -m gpu

bench: $(STAMP)
	$(BIN)/nanovllm bench

# What docs/explanation/reuse-quality.md shows; its table is the output.
eval-reuse: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/nanovllm eval-reuse --questions 96 --out docs/explanation/reuse-quality

# What docs/parity.md shows: every architecture beside transformers.
parity: $(STAMP)
	$(BIN)/python -m tests.parity --out docs/parity

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
