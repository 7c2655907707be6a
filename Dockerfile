# The quickstart in a container: docker build -t ftbench . && docker run --rm --gpus all -v "$PWD/results:/results" ftbench
# (without --gpus all it trains on the CPU, in three minutes on two cores).
FROM python:3.12-slim

# Triton compiles its kernels' launchers with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /ftbench
COPY pyproject.toml README.md ./
COPY src ./src
# What is installed is this folder: there is no version to pin.
# hadolint ignore=DL3013
RUN python -m pip install --no-cache-dir '.[train]'
COPY configs ./configs

ENTRYPOINT ["ftbench"]
CMD ["sweep", "configs/quickstart.yaml", "--out", "/results"]
