//! `xl migrate` and `xl migrate-receive`, as in Xen 4.17 (`tools/xl/xl_migrate.c`).

use xen::handshake::Answer;

use crate::world::World;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Xl {
    /// Its domain runs.
    Streaming,
    /// Its domain is suspended. It waits for "ready".
    Suspended,
    /// It has written the permission, and waits for the report.
    Permitted,
    /// The receiver has failed. It waits until the domain is handed back.
    Failed,
    /// It has exited, and the domain runs.
    Resumed,
    /// It has exited, and the domain is destroyed.
    Destroyed,
    /// It has exited, and the domain is suspended for good.
    Stuck,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Receiver {
    /// It waits for the stream.
    Receiving,
    /// It waits for the permission.
    Loaded,
    /// It has unpaused the copy, and will report that.
    Unpaused,
    /// It has reported a failure, and will destroy the copy.
    Failing,
    Exited,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ReceivedCopy {
    None,
    Paused,
    Running,
}

impl World {
    /// Whether xl has exited, so that it is answered no more.
    pub(crate) fn has_xl_exited(&self) -> bool {
        matches!(self.xl, Xl::Resumed | Xl::Destroyed | Xl::Stuck)
    }

    pub(crate) fn xl_reads(&mut self) -> bool {
        // It reads nothing while it sends its stream.
        if self.xl == Xl::Streaming || self.has_xl_exited() {
            return false;
        }
        let answer = match self.to_xl.pop_front() {
            None if !self.is_xl_closed => return false,
            answer => answer,
        };
        self.xl = match (self.xl, answer) {
            // It can't write its permission.
            (Xl::Suspended, Some(Answer::Ready)) if self.is_xl_closed => Xl::Stuck,
            (Xl::Suspended, Some(Answer::Ready)) => {
                self.has_permission = true;
                Xl::Permitted
            }
            // Anything else in the place of "ready", or the end.
            (Xl::Suspended, _) | (Xl::Failed, Some(Answer::HandedBack)) => Xl::Resumed,
            (Xl::Permitted, Some(Answer::Report { status: 0 })) => Xl::Destroyed,
            (Xl::Permitted, Some(Answer::Report { .. })) => Xl::Failed,
            // The end, or anything else.
            (Xl::Permitted | Xl::Failed, _) => Xl::Stuck,
            (xl, _) => xl,
        };
        true
    }

    pub(crate) fn xl_streams(&mut self) -> bool {
        match self.xl {
            Xl::Streaming if self.is_xl_closed => self.xl = Xl::Resumed,
            // Otherwise its pipe is full.
            Xl::Streaming if self.source_leads() => {
                self.xl = Xl::Suspended;
                self.has_stream = self.destination_receives();
                // The receiver creates it first, and then fills it.
                if self.has_stream {
                    self.copy = ReceivedCopy::Paused;
                }
            }
            _ => return false,
        }
        true
    }

    pub(crate) fn receiver_goes_on(&mut self) -> bool {
        match self.receiver {
            Receiver::Receiving if self.has_stream => {
                self.from_receiver.push_back(Answer::Ready);
                self.receiver = Receiver::Loaded;
            }
            Receiver::Receiving if self.is_receiver_closed => self.receiver = Receiver::Exited,
            Receiver::Loaded if self.is_permission_written => {
                (self.receiver, self.copy) = (Receiver::Unpaused, ReceivedCopy::Running);
            }
            // It could not read the permission, and can't report that.
            Receiver::Loaded if self.is_receiver_unheard => self.receiver = Receiver::Exited,
            Receiver::Loaded if self.is_receiver_closed => self.receiver_fails(u8::MAX),
            Receiver::Unpaused => {
                self.from_receiver.push_back(Answer::Report { status: 0 });
                self.receiver = Receiver::Exited;
            }
            Receiver::Failing => {
                self.from_receiver.push_back(Answer::HandedBack);
                (self.receiver, self.copy) = (Receiver::Exited, ReceivedCopy::None);
            }
            _ => return false,
        }
        true
    }

    pub(crate) fn receiver_fails(&mut self, status: u8) {
        self.from_receiver.push_back(Answer::Report { status });
        self.receiver = Receiver::Failing;
    }
}
