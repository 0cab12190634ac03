//! A connection to one server, or to all servers of a cluster.

use std::io;
use std::time::{Duration, Instant};

use redis::cluster::{ClusterClientBuilder, ClusterConnection, ClusterPipeline};
use redis::{Client, Cmd, Connection, Pipeline, RedisError, RedisResult, Value};

use super::Servers;

/// A pipeline is sent again, once, to a cluster whose slots have moved.
const CLUSTER_RETRIES: u32 = 1;

pub(super) enum Link {
    One(Box<Connection>),
    Cluster(Box<ClusterConnection>),
}

impl Link {
    /// No system call may take longer than `limit`.
    pub(super) fn connect(servers: &Servers, limit: Duration) -> RedisResult<Self> {
        match servers {
            Servers::One(url) => {
                let connection = Client::open(url.as_str())?.get_connection_with_timeout(limit)?;
                Ok(Self::One(Box::new(connection)))
            }
            Servers::Cluster(urls) => {
                let client = ClusterClientBuilder::new(urls.iter().map(String::as_str))
                    .connection_timeout(limit)
                    .response_timeout(limit)
                    .retries(CLUSTER_RETRIES)
                    .build()?;
                Ok(Self::Cluster(Box::new(client.get_connection()?)))
            }
        }
    }

    /// Sends all commands at once, and waits for all replies.
    pub(super) fn run(&mut self, commands: Vec<Cmd>, until: Instant) -> RedisResult<Vec<Value>> {
        if commands.is_empty() {
            return Ok(Vec::new());
        }
        let limit = Some(left(until)?);
        match self {
            Self::One(connection) => {
                connection.set_read_timeout(limit)?;
                connection.set_write_timeout(limit)?;
                let mut pipeline = Pipeline::with_capacity(commands.len());
                commands.into_iter().for_each(|command| {
                    pipeline.add_command(command);
                });
                pipeline.query(connection.as_mut())
            }
            Self::Cluster(connection) => {
                connection.set_read_timeout(limit)?;
                connection.set_write_timeout(limit)?;
                let mut pipeline = ClusterPipeline::with_capacity(commands.len());
                commands.into_iter().for_each(|command| {
                    pipeline.add_command(command);
                });
                pipeline.query(connection.as_mut())
            }
        }
    }
}

/// The longest that a system call may take. An error if there is no time left.
fn left(until: Instant) -> RedisResult<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left < Duration::from_millis(1) {
        return Err(RedisError::from(io::Error::from(io::ErrorKind::TimedOut)));
    }
    Ok(left)
}
