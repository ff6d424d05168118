"""A proxy that ends TLS on both sides and keeps every byte that passes: all that a server gets to see."""

import contextlib
import socket
import ssl
import threading

from .federation import free_port


class Recorder:
    """Between silos and their server.

    Args:
        target: Port of the server on this machine.
        certificate: Of the server, with which it stands in for it.
        key: Of the certificate.
        authority: Whose certificates it believes.
    """

    def __init__(self, target, *, certificate, key, authority):
        self.port, self._target = free_port(), target
        self.from_silos, self.to_silos = bytearray(), bytearray()
        self._inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._inside.load_cert_chain(certificate, key)
        self._outside = ssl.create_default_context(cafile=authority)
        for context in (self._inside, self._outside):
            context.set_alpn_protocols(["h2"])  # as gRPC asks for
        self._lock, self._open = threading.Lock(), []

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._listener.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(raw,), daemon=True).start()

    def _join(self, raw):
        try:
            silo = self._inside.wrap_socket(raw, server_side=True)
            server = socket.create_connection(("127.0.0.1", self._target))
            server = self._outside.wrap_socket(server, server_hostname="localhost")
        except OSError:
            raw.close()
            return
        self._open += [silo, server]
        for source, sink, kept in ((silo, server, self.from_silos), (server, silo, self.to_silos)):
            threading.Thread(target=self._carry, args=(source, sink, kept), daemon=True).start()

    def _carry(self, source, sink, kept):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    kept += data
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
