#!/usr/bin/env python3
"""Passes TCP connections on, and holds what comes back for a while, whatever the bandwidth.

    delay_proxy.py ADDRESS PORT TARGET-PORT MILLISECONDS

Listens on ADDRESS:PORT; the target is on 127.0.0.1. Prints a line once it listens.
"""
import asyncio
import contextlib
import sys

PIECE = 256 << 10


async def forward(reader, writer):
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()


async def delay(reader, writer, seconds):
    """Sends each piece `seconds` after it came: bytes that are under way do not wait for each other."""
    now, under_way = asyncio.get_running_loop().time, asyncio.Queue(maxsize=64)

    async def send():
        with contextlib.suppress(OSError):
            while (item := await under_way.get())[1]:
                due, piece = item
                if (wait := due - now()) > 0:
                    await asyncio.sleep(wait)
                writer.write(piece)
                await writer.drain()
        writer.close()
    sender = asyncio.create_task(send())
    piece = True
    while piece and not sender.done():
        try:
            piece = await reader.read(PIECE)
        except OSError:
            piece = b''
        await under_way.put((now() + seconds, piece))
    await sender


async def main(address, port, target, seconds):
    async def serve(reader, writer):
        try:
            target_reader, target_writer = await asyncio.open_connection('127.0.0.1', target, limit=PIECE)
        except OSError:
            return writer.close()
        requests = asyncio.create_task(forward(reader, target_writer))
        await delay(target_reader, writer, seconds)
        requests.cancel()
        target_writer.close()
    server = await asyncio.start_server(serve, address, port, limit=PIECE)
    print('listening', flush=True)
    await server.serve_forever()


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) / 1000))
