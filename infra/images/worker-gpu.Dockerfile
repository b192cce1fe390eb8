# A worker for NVIDIA GPUs. CUDA's libraries come with torch; the driver comes from the host, by the NVIDIA Container
# Toolkit. Built from the root of the repository.
FROM python:3.11.14-slim-bookworm

# gcc and libc6-dev compile the launchers of Triton's kernels at run time; the rest as in worker.Dockerfile.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap gcc git libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/magrpo
COPY requirements/cuda.txt requirements/ray.txt requirements/
# CUDA's libraries and torch in a layer of their own: two are pulled side by side, and take less room while they are made.
RUN grep --extended-regexp '^(cuda|nvidia|torch|triton)' requirements/cuda.txt > requirements/libraries.txt \
    && pip install --no-cache-dir --no-deps -r requirements/libraries.txt
RUN pip install --no-cache-dir --no-deps -r requirements/cuda.txt -r requirements/ray.txt
COPY pyproject.toml README.md LICENSE ./
COPY magrpo magrpo
COPY magrpo_kernels magrpo_kernels
COPY pipelines pipelines
COPY infra infra
RUN pip install --no-cache-dir --no-deps -e . \
    && useradd --uid 1000 --create-home magrpo \
    && install -d -o magrpo -g magrpo /var/lib/magrpo/runs && ln -s /var/lib/magrpo/runs runs

USER 1000
ENV HF_HOME=/var/lib/magrpo/runs/huggingface \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["prefect", "worker", "start", "--type", "process", "--pool", "magrpo", "--limit", "1"]
