# Stands in for Docker Hub's postgres where that cannot be reached: Debian's PostgreSQL behind the same contract.
# https://hub.docker.com/_/postgres
ARG BASE
FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends postgresql gosu \
    && rm -rf /var/lib/apt/lists/* /var/lib/postgresql/* \
    && usermod --uid 999 postgres && groupmod --gid 999 postgres \
    && ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/ \
    && install -d -o 999 -g 999 /var/run/postgresql /var/lib/postgresql/data /docker-entrypoint-initdb.d
COPY postgres-entrypoint.sh /usr/local/bin/
ENV PGDATA=/var/lib/postgresql/data LANG=C.UTF-8
VOLUME /var/lib/postgresql/data
EXPOSE 5432
ENTRYPOINT ["postgres-entrypoint.sh"]
