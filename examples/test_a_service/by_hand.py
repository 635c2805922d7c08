from backend_client import NPUClient, NPUUnavailableError
from backend_client.cloud import CloudClient


async def embed(text: str, npu_client: NPUClient, openai_client: CloudClient) -> list[float]:
    try:
        return await npu_client.embed(text)
    except NPUUnavailableError:
        return await openai_client.embed(text)
