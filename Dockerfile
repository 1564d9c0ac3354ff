# The image that `shoal emit k8s` names. Build it in the source folder, and push it to a registry that the cluster reads:
#
#   docker build -t shoal:0.2.0 .
#
# For NVIDIA GPUs: docker build -t shoal:0.2.0 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/shoal
COPY constraints.txt ./
# First and alone: this layer is large, and changes only with the version.
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch==$(sed -n 's/^torch==//p' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt .

# Pods mount their volume here, and runs/ is made below it.
WORKDIR /data
ENTRYPOINT ["shoal"]
CMD ["--help"]
