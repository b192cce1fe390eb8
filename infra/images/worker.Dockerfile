# A worker without a GPU: the project at its pinned versions, and a Prefect worker. Built from the root of the
# repository.
FROM python:3.11.14-slim-bookworm

# bubblewrap is the sandbox, libnuma what vLLM's CPU build loads, git what Prefect pulls code with.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap git libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/magrpo
COPY requirements/cpu.txt requirements/ray.txt requirements/
# Triton is left out: 0.7 GB, and its kernels need a GPU.
# Where the CPU build of torch comes from; empty: pip's own index. It is asked for torch only, and once.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --no-deps --retries 0 ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        "$(grep '^torch==' requirements/cpu.txt)" \
    && sed -i '/^triton==/d' requirements/cpu.txt \
    && pip install --no-cache-dir --no-deps -r requirements/cpu.txt -r requirements/ray.txt
COPY pyproject.toml README.md LICENSE ./
COPY magrpo magrpo
COPY magrpo_kernels magrpo_kernels
COPY pipelines pipelines
COPY infra infra
RUN pip install --no-cache-dir --no-deps -e . \
    && useradd --uid 1000 --create-home magrpo \
    && install -d -o magrpo -g magrpo /var/lib/magrpo/runs && ln -s /var/lib/magrpo/runs runs

USER 1000
ENV HF_HOME=/var/lib/magrpo/runs/huggingface
CMD ["prefect", "worker", "start", "--type", "process", "--pool", "magrpo", "--limit", "1"]
