# Every target sets up .venv by itself; the stamps make the second time quick.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
DEV    := $(VENV)/.stamp-dev
DOCS   := $(VENV)/.stamp-docs
LMEVAL := $(VENV)/.stamp-lm-eval
GPU    := $(if $(shell command -v nvidia-smi 2>/dev/null),[cuda])
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# By environment, because pip's isolated builds see no command line. Newer ones read the second for what they build with.
export PIP_CONSTRAINT       := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: setup help demo test test-long test-gpu lint docs reference pictures notebooks bench bench-gpu bench-gpus bench-http eval-reuse parity clean

setup: $(DEV)

# The names of the targets.
help:
	@grep -oE '^[a-z-]+:' Makefile | tr -d :

# The package alone, which is all that a user needs. TORCH_INDEX is where torch comes from; the README names the index of CPU builds.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX))
	$(PIP) -e ".$(GPU)"
	touch $(STAMP)

# And the tools for tests, lint and builds.
$(DEV): $(STAMP)
	$(PIP) -e ".[dev]"
	touch $(DEV)

# And lm-eval with its 620 MB of packages, which one test needs. Where they cannot be installed, pytest says that it was skipped.
$(LMEVAL): $(DEV)
	if $(PIP) -e ".[lm-eval]"; then touch $(LMEVAL); fi

# And the tools for the site.
$(DOCS): $(STAMP)
	$(PIP) -e ".[docs]"
	touch $(DOCS)

demo: $(STAMP)
	$(BIN)/nanovllm generate --model tiny --stream --max-tokens 200 "Once upon a time, in a small village by the sea,"
	$(BIN)/nanovllm generate --model tiny --chat --stream --max-tokens 200 "The capital of Aistonia is Velmora. What is the capital of Aistonia?"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/pyright

# In several processes with a thread each: threads of their own would spin for cores that the other processes need.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --dist worksteal
PYTEST := $(TESTS) -n auto --maxprocesses 4
# On two cores, where tests wait for servers and ranks, three processes were a quarter faster than two.
WAITING := $(TESTS) -n $(shell echo $$((3 * $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) / 2))) --maxprocesses 6

HOOK := --jaxtyping-packages=nanovllm,beartype.beartype

# Five runs. In the first, jaxtyping's import hook checks shapes and types. The second runs without the hook, which torch.compile cannot
# trace, and which makes whole engines three to six times as slow; `make test-long` runs these with it.
# Triton's interpreter, which runs the GPU's kernels on a CPU, is chosen once for all kernels when they are defined.
# The fourth starts Ray, whose processes need the cores, so its tests run one after another.
# The fifth is that of another package, with plugins of pytest that the others do without.
test: lint $(LMEVAL)
	$(PYTEST) -m "not compile and not unhooked and not gpu and not interpret and not long and not ray" $(HOOK)
	$(WAITING) -m "(compile or unhooked) and not gpu and not long"
	TRITON_INTERPRET=1 $(PYTEST) -m "interpret and not long"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m ray tests/entrypoints/ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q integrations/langchain-nanovllm

# Minutes of work that `make test` leaves out: the widest sweeps, the mutation run, the package built and installed in a fresh environment.
test-long: $(LMEVAL)
	$(PYTEST) -m "(unhooked or long) and not compile and not gpu and not interpret" --ignore=tests/mutation $(HOOK)
	$(PYTEST) -m "long and compile and not gpu"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m long tests/mutation  # has processes of its own
	TRITON_INTERPRET=1 $(PYTEST) -m "long and interpret"

test-gpu: $(DEV)
	$(BIN)/python -m pytest -q -m gpu

# The site, in build/site. Every warning is an error.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The generated parts of docs/reference: the command line, the options and the table of models.
reference: $(STAMP)
	$(BIN)/python tools/write_reference.py

# The outputs of the notebooks in examples/.
notebooks: $(DEV)
	$(BIN)/python tools/run_notebooks.py

# The pictures of the chat page in the documents, taken by its tests in a browser.
pictures: $(DEV)
	PICTURES=docs/how-to/chat-page $(BIN)/python -m pytest -q tests/entrypoints/page/test_pictures.py

bench: $(STAMP)
	$(BIN)/nanovllm bench

# All tests and figures that need GPUs, side by side on the GPUs of this host, for an hour at most; `--parts` and `--limit` take fewer.
bench-gpu: $(DEV)
	$(BIN)/python -m benchmarks.record_gpu

# Of these the figures of 2, 4 or 8 GPUs together, for benchmarks/results. GPUS is their number, CARD the name in the files.
GPUS ?= 2
CARD ?= h200
bench-gpus: $(DEV)
	rm -f benchmarks/out/$(CARD)x$(GPUS)-*.json
	$(BIN)/python -m benchmarks.record_gpu --parts x$(GPUS) --card $(CARD); code=$$?; \
		cp benchmarks/out/$(CARD)x$(GPUS)-*.json benchmarks/results/ && exit $$code

# Streams over HTTP from the packaged model, beside the library on the same work.
bench-http: $(DEV)
	$(BIN)/python -m benchmarks.http_bench

# What docs/explanation/reuse-quality.md shows; its table is the output.
eval-reuse: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/nanovllm eval-reuse --questions 96 --out docs/explanation/reuse-quality
	OMP_NUM_THREADS=1 $(BIN)/nanovllm eval-reuse --questions 96 --kv-dtype fp8 --out docs/explanation/reuse-quality-fp8
	rm -f docs/explanation/reuse-quality-fp8.svg  # its figures are shown as a table

# The pages docs/reference/parity*.md: every architecture, and every quantised format, compared with transformers.
parity: $(DEV)
	$(BIN)/python -m tests.parity --out docs/reference/parity
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity.quantised --out docs/reference/parity-quantised

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
