"""A Celery worker with one client in each process: celery -A celery_tasks worker."""

from celery import Celery
from celery.signals import worker_process_init, worker_process_shutdown

from backend_client.sync import InferenceClient

app = Celery("tasks")
client: InferenceClient


@worker_process_init.connect
def open_client(**_):
    global client
    client = InferenceClient.from_settings()


@worker_process_shutdown.connect
def close_client(**_):
    client.close()


@app.task
def embed(texts: list[str]) -> list[list[float]]:
    return client.embed_many(texts, priority="batch").tolist()
