# make demo   train on real image-text pairs, write demo.png
# make test   everything: CPU here, GPU tests too where a GPU is
# make lint   what CI checks besides tests
# make dev    an editable install for work on the package
#
# Everything runs in .venv, made on first use. PYTHON chooses its interpreter.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py $(shell find csrc infloss -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.pyi')
CXX_FILES := $(shell find csrc bench -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test lint format dev cmake abi-check clean

demo: $(VENV)/.installed
	$(BIN)/python examples/train_emoji.py --output demo.png

test: $(VENV)/.installed
	$(BIN)/pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy
	$(BIN)/python bench/update_readme.py --check

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

dev: $(VENV)/.python
	$(BIN)/pip install 'setuptools>=77' 'torch>=2.11' ninja
	$(BIN)/pip install --no-build-isolation -e '.[test,lint]'
	touch $(VENV)/.editable $(VENV)/.installed

cmake:
	cmake -S . -B build/cmake -G Ninja
	cmake --build build/cmake
	ctest --test-dir build/cmake --output-on-failure

# One built library under another Python and torch: make abi-check OTHER=/path/to/python
abi-check: $(VENV)/.installed
	$(BIN)/python tests/abi_check.py $(OTHER)

clean:
	rm -rf build $(VENV) *.egg-info infloss/*.so

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.python $(SOURCES)
	if [ -e $(VENV)/.editable ]; then \
	  $(BIN)/pip install --no-build-isolation -e '.[test,lint]'; \
	else \
	  $(BIN)/pip install '.[test,lint]'; \
	fi
	touch $@
