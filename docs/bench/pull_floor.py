#!/usr/bin/env python3
"""The floor of a cold pull: fetches, hashes, inflates and writes each layer of an image as one file, and nothing else.

    pull_floor.py HOST:PORT/REPOSITORY:TAG DIR [STREAMS]

The registry speaks plain HTTP, the layers are gzip archives. DIR is an empty directory, STREAMS the number of layers
that are fetched at once (default 3). Layers are inflated with ISA-L where the package `isal` is installed, else with
zlib. Returns after a `syncfs` and prints the seconds until it, those of it, and CPU seconds.
"""
import ctypes
import hashlib
import http.client
import json
import os
import queue
import resource
import sys
import threading
import time

try:
    from isal import isal_zlib as zlib
except ImportError:
    import zlib

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
PIECE = 1 << 18


def get(host, path, accept=None):
    connection = http.client.HTTPConnection(host)
    connection.request("GET", path, headers={"Accept": accept} if accept else {})
    return connection.getresponse()


def write(chunks, path, plain):
    with open(path, "wb", buffering=0) as file:
        while (chunk := chunks.get()) is not None:
            plain.update(chunk)
            file.write(chunk)


def fetch(host, repository, digest, directory):
    body = get(host, f"/v2/{repository}/blobs/{digest}")
    compressed, inflate, chunks = hashlib.sha256(), zlib.decompressobj(31), queue.Queue(8)
    writer = threading.Thread(target=write, args=(chunks, f"{directory}/{digest[7:19]}", hashlib.sha256()))
    writer.start()
    piece = memoryview(bytearray(PIECE))
    while count := body.readinto(piece):
        compressed.update(piece[:count])
        if chunk := inflate.decompress(piece[:count]):
            chunks.put(chunk)
    chunks.put(None)
    writer.join()
    if f"sha256:{compressed.hexdigest()}" != digest:
        sys.exit(f"{digest}: other bytes arrived")


def main():
    image, directory = sys.argv[1:3]
    streams = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    host, rest = image.split("/", 1)
    repository, tag = rest.rsplit(":", 1)
    layers = json.load(get(host, f"/v2/{repository}/manifests/{tag}", MANIFEST))["layers"]
    waiting = queue.Queue()
    for layer in sorted(layers, key=lambda layer: -layer["size"]):
        waiting.put(layer["digest"])

    def work():
        while True:
            try:
                fetch(host, repository, waiting.get_nowait(), directory)
            except queue.Empty:
                return

    begun = time.monotonic()
    workers = [threading.Thread(target=work) for _ in range(streams)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    fetched = time.monotonic()
    ctypes.CDLL(None).syncfs(os.open(directory, os.O_RDONLY))
    synced = time.monotonic()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{image}: {fetched - begun:.2f} s, sync {synced - fetched:.2f} s, CPU {usage.ru_utime + usage.ru_stime:.2f} s")


if __name__ == "__main__":
    main()
