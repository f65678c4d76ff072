"""``ipcsync keys``: the CURVE keys of ``tcp://`` endpoints, and who is let in."""

from __future__ import annotations

import json

import click

from . import keys as store


@click.group()
def keys() -> None:
    """Keys for brokers and clients that meet over tcp://.

    Without --tcp a broker needs none: then it is the runtime directory that keeps others out.
    """


@keys.command()
@click.argument("names", nargs=-1, type=click.Choice([store.BROKER, store.CLIENT]))
def make(names: tuple[str, ...]) -> None:
    """Makes the pairs that are missing: the broker's and this user's. None is ever overwritten."""
    where = store.folder()
    for name in names or (store.BROKER, store.CLIENT):
        click.echo(f"{name} {store.make(where, name)}")
    click.echo(f"in {where}", err=True)


@keys.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def show(as_json: bool) -> None:
    """Prints the public keys."""
    where = store.folder()
    found = {name: store.public(where, name) for name in (store.BROKER, store.CLIENT)}
    if as_json:
        click.echo(json.dumps({"folder": str(where), **found}))
        return
    for name, key in found.items():
        click.echo(f"{name} {key or '- (none: `ipcsync keys make`)'}")


@keys.command()
@click.argument("name")
@click.argument("key", required=False)
def allow(name: str, key: str | None) -> None:
    """Lets a client's public KEY in, under a NAME to revoke it by. Without KEY: this user's own."""
    where = store.folder()
    given = key or store.public(where, store.CLIENT)
    if given is None:
        raise click.UsageError("there is no client key here: give the KEY, or `ipcsync keys make`")
    store.allow(where, name, given)
    click.echo(f"{name} {given}")


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def list_(as_json: bool) -> None:
    """Prints who is let in."""
    found = {name: key for key, name in store.allowed(store.folder()).items()}
    click.echo(json.dumps(found) if as_json else "\n".join(f"{n} {k}" for n, k in found.items()) or "nobody")


@keys.command()
@click.argument("name")
def revoke(name: str) -> None:
    """Lets NAME in no longer: not even over a connection that stands. What it has mapped stays mapped."""
    store.revoke(store.folder(), name)
    click.echo(f"revoked {name}")
