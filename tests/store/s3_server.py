"""moto's S3 server, one PUT after another: `python s3_server.py PORT`.

S3 answers conditional puts as if they came in turn. moto looks and puts in two steps,
each request in a thread of its own, and on a busy machine lets two first writers
through.
"""

import sys
import threading

from moto.moto_server import werkzeug_app
from werkzeug import serving


def in_turn(app):
    """Return an application whose PUTs wait for each other."""
    turn = threading.Lock()

    def serve(environ, start_response):
        if environ["REQUEST_METHOD"] != "PUT":
            return app(environ, start_response)
        with turn:
            return app(environ, start_response)

    return serve


if __name__ == "__main__":
    s3 = werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)
    serving.run_simple("127.0.0.1", int(sys.argv[1]), in_turn(s3), threaded=True)
