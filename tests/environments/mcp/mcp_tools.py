"""An MCP server for tests, written with the official SDK. It speaks stdio, or with ``--http`` on a free port."""

from __future__ import annotations

import io
import os
import socket
import sys

import anyio
import PIL.Image
from mcp.server.fastmcp import FastMCP, Image
from mcp.types import CallToolRequest, EmbeddedResource, EmptyResult, ServerResult, TextResourceContents

server = FastMCP("tools", stateless_http=False)
_count = 0


@server.tool()
def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """How often this session has counted."""
    global _count
    _count += 1
    return str(_count)


@server.tool(structured_output=False)
def picture() -> list[object]:
    """A text and an image."""
    return ["a red dot", Image(data=b"\x89PNG" * 9, format="png")]


@server.tool(structured_output=False)
def plot() -> list[object]:
    """Texts and an image that can be decoded."""
    out = io.BytesIO()
    PIL.Image.new("RGB", (4, 3), (250, 0, 0)).save(out, format="PNG")
    return ["a red", "dot", Image(data=out.getvalue(), format="png"), "done"]


@server.tool(structured_output=False)
def document() -> EmbeddedResource:
    """A resource with text."""
    text = TextResourceContents(uri="memo://1", mimeType="text/plain", text="to be read")  # type: ignore[arg-type]
    return EmbeddedResource(type="resource", resource=text)


@server.tool()
def refuse() -> str:
    """Raises."""
    raise ValueError("not today")


@server.tool()
async def sleep() -> str:
    """Never answers."""
    await anyio.sleep_forever()
    return ""


@server.tool()
def end() -> str:
    """Ends the server, and, if a file is named, leaves it behind so that no other starts."""
    if "MCP_TOOLS_DEAD" in os.environ:
        open(os.environ["MCP_TOOLS_DEAD"], "w").close()
    os._exit(3)


@server.tool()
def garble() -> str:
    """Its result is malformed."""
    return ""


@server.tool()
def pid() -> str:
    """The server's process."""
    return str(os.getpid())


_answer = server._mcp_server.request_handlers[CallToolRequest]


async def _answer_or_garble(request: CallToolRequest) -> ServerResult:
    return ServerResult(EmptyResult()) if request.params.name == "garble" else await _answer(request)


server._mcp_server.request_handlers[CallToolRequest] = _answer_or_garble


def main() -> None:
    if os.path.exists(os.environ.get("MCP_TOOLS_DEAD", "")):
        sys.exit("the disk is gone")
    if "--http" not in sys.argv:
        server.run("stdio")
        return
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run([listening])


if __name__ == "__main__":
    main()
