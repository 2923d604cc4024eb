"""The data path: where asyncio and aiohttp meet the wire."""
